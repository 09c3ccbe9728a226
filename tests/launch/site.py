"""A cluster that is not there: a profile, a run that fits it, and commands that answer from a table."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpc_rollart.config import RunConfig
from hpc_rollart.config.cluster import Cluster
from hpc_rollart.jobs.commands import SlurmError, explain
from hpc_rollart.launch.submit import Submitted, submit

# What squeue says of the usual run's job, `squeue_command`'s columns.
RUNNING = "".join(f"4711+{n}|RUNNING|p|1|1:00:00|2026-12-01T01:10:25|n{n}|None\n" for n in range(4))
PENDING = "".join(f"4711+{n}|PENDING|p|1|1:00:00|N/A||Resources\n" for n in range(4))
ENDED = RUNNING.replace("RUNNING", "TIMEOUT")

Answer = str | SlurmError | Callable[[Sequence[str]], str]


def refused(name: str, said: str) -> SlurmError:
    """Return what `commands.run` raises when a command refuses."""
    return SlurmError(explain(name, said), said)


class FakeSlurm:
    """Answers Slurm's commands by their names and keeps what was asked."""

    def __init__(self, **answers: Answer) -> None:
        self.answers: dict[str, Answer] = {
            "sbatch": "Submitted batch job 4711\n",
            "scontrol": refused("scontrol", "slurm_load_jobs error: Invalid job id specified"),
            "squeue": refused("squeue", "slurm_load_jobs error: Invalid job id specified"),
            "sacct": refused("sacct", "Slurm accounting storage is disabled"),
            "scancel": "",
        } | answers
        self.asked: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.asked.append(list(command))
        answer = self.answers[command[0]]
        if isinstance(answer, SlurmError):
            raise answer
        return answer if isinstance(answer, str) else answer(command)

    def names(self) -> list[str]:
        """Return the commands that were asked, in order."""
        return [command[0] for command in self.asked]


class FakeClock:
    """A clock that only `sleep` moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_cluster(**changes: Any) -> Cluster:
    """Return a site with two kinds of GPU and CPU nodes."""
    return Cluster.model_validate(
        {
            "description": "a site",
            "partitions": {
                "big": {
                    "partition": "gpu-h100",
                    "gpu": "h100",
                    "gres": "gpu:h100:{count}",
                    "gpus_per_node": 4,
                    "cpus_per_node": 64,
                    "max_nodes": 8,
                    "max_time": "24h",
                },
                "wide": {
                    "partition": "gpu-h20",
                    "gpu": "h20",
                    "gres": "gpu:h20:{count}",
                    "gpus_per_node": 8,
                    "cpus_per_node": 96,
                },
                "cpu": {"partition": "standard", "cpus_per_node": 128},
            },
            "roles": {"trainer": "big", "generator": "wide", "env": "cpu"},
            "time": "2h",
            "python": "/sw/rollart/bin/python",
            "scratch": "$TMPDIR",
        }
        | changes
    )


def make_run(directory: Path, **changes: Any) -> RunConfig:
    """Return a run with components of all roles, two nodes of generators among them."""
    data: dict[str, Any] = {
        "run": {"name": "demo", "dir": str(directory / "demo"), "steps": 100},
        "model": {"builtin": "tiny", "max_context": 256},
        "algorithm": {"type": "grpo"},
        "tasks": [{"name": "lake", "env": "frozen-lake"}],
        "components": {
            "trainer": {"role": "trainer", "gpus_per_rank": 1, "cpus_per_rank": 16},
            "generate-compute": {
                "role": "generator", "pool": "compute", "gpu": "h100", "ranks_per_node": 2,
                "gpus_per_rank": 1, "cpus_per_rank": 8,
            },
            "generate-bandwidth": {
                "role": "generator", "pool": "bandwidth", "nodes": 2, "ranks_per_node": 8,
                "gpus_per_rank": 1, "cpus_per_rank": 12,
            },
            "env": {"role": "env", "nodes": 2, "ranks_per_node": 4, "cpus_per_rank": 8},
        },
    }  # fmt: skip
    for key, value in changes.items():
        data["components"][key.replace("_", "-")] |= value
    return RunConfig.model_validate(data)


def sent(directory: Path, slurm: FakeSlurm | None = None, **cluster: Any) -> Submitted:
    """Submit the usual run; temporary folders are below /tmp, so the paths are said to be shared."""
    return submit(
        make_run(directory), make_cluster(**cluster), ["x"], shared=True, runner=slurm or FakeSlurm()
    )
