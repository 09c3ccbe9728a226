"""Where the ranks find the policy: noted in the manifest before any of them starts."""

import json
from pathlib import Path

from rich.console import Console

from hpc_rollart.config import RunConfig
from hpc_rollart.launch import rundir
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
