"""The run directory: private, complete, and never over another run."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from hpc_rollart.config import ConfigError, load_resolved
from hpc_rollart.launch import rundir
from tests.launch.conftest import make_config


def test_new_run_directory_is_private_and_says_what_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = rundir.create(config, ["hpc-rollart", "run", "x.yaml"])
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert (run.path / "logs" / "0").is_dir()
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        rundir.create(make_config(tmp_path), [])


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_read_only_file_system_is_refused(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    code = (
        "from pathlib import Path; from hpc_rollart.launch import rundir;"
        "from tests.launch.conftest import make_config;"
        f"rundir.create(make_config(Path({str(tmp_path)!r})), [])"
    )
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f'{mount} || exit 77; exec "$0" -c "$1"',
            rundir.sys.executable,
            code,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this machine lets nobody mount")
    assert "ConfigError: run.dir:" in done.stderr
    assert "is not writable" in done.stderr or "Read-only file system" in done.stderr
