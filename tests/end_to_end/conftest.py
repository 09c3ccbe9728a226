"""Runs whole worlds through the command line, as a user does; nothing is faked."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@dataclass
class Run:
    """A finished `hpc-rollart run`."""

    path: Path
    code: int
    output: str

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        """The final status.json."""
        return json.loads((self.path / "status.json").read_text())


def base_config() -> dict[str, Any]:
    """A world of five ranks that trains a freshly made policy for a few quick steps."""
    return {
        "run": {"name": "small", "seed": 1, "steps": 4},
        "model": {"path": os.environ["ROLLART_TEST_MODEL"], "max_context": 256},
        "algorithm": {"type": "grpo", "group_size": 2, "groups_per_batch": 2, "learning_rate": 1e-3},
        "tasks": [
            {
                "name": "steady",
                "env": "tests.rollout.faulty_envs:Steady",
                "args": {"turns": 2},
                "affinity": "compute",
                "max_turns": 4,
                "sampling": {"max_tokens": 4},
            }
        ],
        "components": {
            "trainer": {"role": "trainer"},
            "generate-compute": {"role": "generator", "pool": "compute"},
            "generate-bandwidth": {"role": "generator", "pool": "bandwidth"},
            "env": {"role": "env", "ranks_per_node": 2, "slots": 8},
        },
        "store": {"flush_every_s": 0.5},
    }


def start(config: dict[str, Any], folder: Path, *options: str) -> tuple["subprocess.Popen[str]", Path]:
    """Start `hpc-rollart run` on `config`; the run directory is `folder/run`."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    path = folder / "run"
    command = [sys.executable, "-m", "hpc_rollart", "run", str(file), "--dir", str(path), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return (
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ),
        path,
    )


def complete(config: dict[str, Any], folder: Path, *options: str, timeout: float = 240) -> Run:
    """Run `config` to its end."""
    process, path = start(config, folder, *options)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return Run(path, process.returncode, output)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of models away from the user's."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def built(cache: Path) -> str:
    """Return the folder of one freshly made policy for all tests here."""
    # `base_config` needs some path, if only to be built from.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLART_TEST_MODEL", str(cache))
        config = base_config() | {"model": {"builtin": "tiny", "max_context": 256}}
    file = cache / "tiny.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "hpc_rollart", "model", "build", str(file)]
    environment = {**os.environ, "ROLLART_CACHE": str(cache)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module", autouse=True)
def model(cache: Path, built: str) -> Iterator[None]:
    """Show that policy to the runs of a file, and to those of no other folder's tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLART_CACHE", str(cache))
        patch.setenv("ROLLART_TEST_MODEL", built)
        yield
