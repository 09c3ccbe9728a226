"""The run directory: private, complete, and never over another run."""

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hpc_rollart.config import ConfigError, load_resolved
from hpc_rollart.errors import UserError
from hpc_rollart.launch import rundir
from tests.launch.conftest import make_config


def test_new_run_directory_is_private_and_says_what_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = rundir.create(config, ["hpc-rollart", "run", "x.yaml"])
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert load_resolved(run.path) == config
    assert yaml.safe_load((run.path / "config.yaml").read_text())["schedule"]["alpha"] == 1
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["run_id"] == run.run_id
    assert manifest["argv"] == ["hpc-rollart", "run", "x.yaml"]
    assert manifest["versions"]["numpy"]
    assert set(manifest) >= {"host", "started", "git", "slurm", "python"}


def test_directory_that_holds_a_run_is_refused_with_the_mend(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    first = rundir.create(config, [])
    with pytest.raises(ConfigError, match=r"holds another run, started .*; choose a new one with --dir"):
        rundir.create(config, [])
    assert json.loads((first.path / "manifest.json").read_text())["run_id"] == first.run_id


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="is not empty"):
        rundir.create(config, [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not a run's manifest"),
        ("[]", "not a run's manifest"),
        ('{"directory": "/x"}', "missing required field `run_id`"),
        ('{"run_id": 7}', "got `int`"),
        ('{"run_id": "a", "directory": ["/x"]}', "got `array`"),
        ('{"run_id": "a", "model_dir": 7}', "got `int`"),
    ],
)
def test_damaged_manifest_is_an_error_with_the_mend(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    for use in (rundir.read_manifest, rundir.amend_manifest):
        with pytest.raises(UserError, match=rf"manifest\.json: .*{why}.*; restore it, or go on in a new run"):
            use(tmp_path)


def test_run_with_a_damaged_manifest_is_a_run_all_the_same(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    (rundir.create(config, []).path / "manifest.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds another run; choose a new one"):
        rundir.create(config, [])


def test_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o755)
    run = rundir.create(make_config(tmp_path), [])
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700


def test_path_below_a_regular_file_is_refused_naming_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made: .*/file is not a directory"):
        rundir.create(make_config(tmp_path / "file" / "below"), [])


def test_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="run is not a directory"):
        rundir.create(make_config(tmp_path), [])


def test_file_system_that_refuses_is_an_error_and_no_traceback() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir: /proc/run cannot be (made|written)"):
        rundir.create(make_config(Path("/proc")), [])


@contextlib.contextmanager
def not_as_root() -> Iterator[None]:
    """Root may write everywhere, so be somebody else meanwhile."""
    if os.geteuid():
        yield
        return
    os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_directory_without_write_permission_is_refused() -> None:
    # Not in tmp_path, which lies in a folder that only its owner may enter.
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o555)
        with not_as_root(), pytest.raises(ConfigError, match=f"{directory} is not writable"):
            rundir.create(make_config(Path(directory)), [])
        assert not any(Path(directory).iterdir())


@pytest.mark.parametrize("directory", ["", "~nobody-of-this-name/run", "a\0b", "a\udcffb"])
def test_a_run_directory_that_is_no_path_is_refused(tmp_path: Path, directory: str) -> None:
    config = make_config(tmp_path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": directory})})
    with pytest.raises(ConfigError, match=r"run\.dir: .* is no path"):
        rundir.create(config, [])
