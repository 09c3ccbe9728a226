"""A small config and a run directory for the launch tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_rollart.config import RunConfig
from hpc_rollart.launch import rundir
from hpc_rollart.launch.rundir import RunDir


def make_config(directory: Path, **launch: float) -> RunConfig:
    """Return a run of four ranks: env 2, trainer 1, generator 1 with two threads."""
    return RunConfig.model_validate(
        {
            "run": {"name": "fake", "dir": str(directory / "run"), "steps": 3},
            "model": {"builtin": "tiny", "max_context": 256},
            "algorithm": {"type": "grpo"},
            "tasks": [{"name": "count", "env": "count"}],
            "components": {
                "env": {"role": "env", "ranks_per_node": 2},
                "trainer": {"role": "trainer"},
                "generate": {"role": "generator", "cpus_per_rank": 2},
            },
            "launch": launch,
        }
    )


@pytest.fixture
def world_of(tmp_path: Path) -> Callable[..., tuple[RunConfig, RunDir]]:
    """Make a run directory whose ranks will play the named scene."""

    def make(scene: str, **launch: float) -> tuple[RunConfig, RunDir]:
        config = make_config(tmp_path, **launch)
        run = rundir.create(config, ["hpc-rollart", "run"])
        (run.path / "scene").write_text(scene)
        return config, run

    return make
