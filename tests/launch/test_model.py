"""Where the ranks find the policy: noted in the manifest before any of them starts."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_rollart.config import ConfigError, RunConfig
from hpc_rollart.launch import model, rundir
from hpc_rollart.launch.model import ensure_model
from tests.launch.conftest import make_config


def test_directory_of_ones_own_model_is_noted_as_it_is(tmp_path: Path) -> None:
    data = make_config(tmp_path).resolved()
    data["model"] |= {"builtin": None, "path": str(tmp_path / "policy")}
    config = RunConfig.parse(data)
    run = rundir.create(config, [])
    ensure_model(config, run.path, Console())
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["model_dir"] == str(tmp_path / "policy")
    assert manifest["run_id"] == run.run_id


@pytest.mark.parametrize("cached", [True, False])
def test_a_process_that_builds_the_model_is_started_only_if_it_is_not_cached(
    cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    run = rundir.create(config, [])
    folder = tmp_path / "tiny-0123456789ab"
    started: list[str] = []

    def build(line: list[str], **_options: Any) -> subprocess.CompletedProcess[bytes]:
        started.append(line[2])
        return subprocess.CompletedProcess(line, 0)

    monkeypatch.setattr(model, "find", lambda _model, _tasks: folder if cached else None)
    monkeypatch.setattr(subprocess, "run", build)
    ensure_model(config, run.path, Console())
    assert started == ([] if cached else ["hpc_rollart.launch.model"])
    noted = json.loads((run.path / "manifest.json").read_text()).get("model_dir")
    assert noted == (str(folder) if cached else None)


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        (-signal.SIGTERM, KeyboardInterrupt, ""),
        (130, KeyboardInterrupt, ""),
        (-signal.SIGKILL, ConfigError, "ended by SIGKILL; is there enough memory"),
        (2, ConfigError, "could not be prepared"),
    ],
)
def test_how_the_process_that_builds_the_model_ended_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException], why: str
) -> None:
    config = make_config(tmp_path)
    run = rundir.create(config, [])
    monkeypatch.setattr(model, "find", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda line, **_: subprocess.CompletedProcess(line, code))
    with pytest.raises(error, match=why or None):
        ensure_model(config, run.path, Console(quiet=True))
