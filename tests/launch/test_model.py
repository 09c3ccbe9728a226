"""Where the ranks find the policy: noted in the manifest before any of them starts."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_rollart.config import RunConfig
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
