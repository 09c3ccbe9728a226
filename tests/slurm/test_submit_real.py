"""From a run's config to a real heterogeneous job and back; a stand-in takes the supervisor's place."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from hpc_rollart.config import ConfigError, RunConfig
from hpc_rollart.config.cluster import Cluster, load_cluster
from hpc_rollart.jobs import book, cancel, follow
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.jobs.follow import Choice
from hpc_rollart.jobs.queue import Phase, Queue
from hpc_rollart.jobs.status import Watcher
from hpc_rollart.launch import submit
from hpc_rollart.launch.placement import with_choices
from hpc_rollart.launch.submit import Submitted
from tests.slurm.conftest import Testbed

# The nodes do not find this file, so what it defines is pickled whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# The testbed's nodes are shared with whatever other tests run at the same time.
_PATIENCE_S = 240.0
pytestmark = pytest.mark.timeout(600)


class StandIn:
    """Writes down what the batch step sees, then waits for a signal and says which one it was."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def __call__(self) -> None:
        import json
        import os
        import signal
        import socket
        import time

        got: list[int] = []
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _frame: got.append(number))
        seen = {"env": dict(os.environ), "host": socket.gethostname(), "pid": os.getpid(), "cwd": os.getcwd()}
        with open(f"{self.run_dir}/seen.json.new", "w") as file:
            json.dump(seen, file)
        os.rename(f"{self.run_dir}/seen.json.new", f"{self.run_dir}/seen.json")
        print("the stand-in is at work", flush=True)
        end = time.monotonic() + 100
        while not got and time.monotonic() < end:
            time.sleep(0.05)
        print(f"stopped by {[signal.Signals(number).name for number in got]}", flush=True)


def config_in(directory: Path, **changes: Any) -> RunConfig:
    components = {
        "trainer": {"role": "trainer", "gpus_per_rank": 1},
        "generate": {"role": "generator", "gpus_per_rank": 1},
        "env": {"role": "env", "ranks_per_node": 2},
    }
    for key, value in changes.items():
        components[key] |= value
    return RunConfig.model_validate(
        {
            "run": {"name": "real", "dir": str(directory / "a run"), "steps": 3},
            "model": {"builtin": "tiny", "max_context": 256},
            "algorithm": {"type": "grpo"},
            "tasks": [{"name": "lake", "env": "frozen-lake"}],
            "components": components,
            "launch": {"stop_lead_s": 60.0},
        }
    )


def wait(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited {_PATIENCE_S:.0f} s for {what}"
        time.sleep(0.2)


@pytest.fixture
def cluster(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The testbed's profile; whatever the tests themselves run in, Slurm is the testbed's from here on."""
    for name, value in testbed.env.items():
        if name.startswith(("SLURM_", "ROLLART_")):
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(submit, "supervise", lambda run_dir: StandIn(str(run_dir)))
    return load_cluster("testbed", ["time=5m"])


@pytest.fixture
def shared(testbed: Testbed) -> Iterator[Path]:
    """A directory that all nodes see; the jobs of the runs in it are ended with the test."""
    path = testbed.shared / f"submit-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir(mode=0o755)
    yield path
    for run in path.glob("*/slurm"):
        for record in book.records(run.parent):
            testbed.run("scancel", str(record.job))
            queue = Queue(record.job, every_s=1.0)
            wait(lambda queue=queue: not queue.state().there, f"job {record.job} to end")
    shutil.rmtree(path, ignore_errors=True)


def send(config: RunConfig, cluster: Cluster) -> Submitted:
    return submit.submit(config, cluster, ["test"], shared=True)


def at_work(run: Path) -> dict[str, Any]:
    wait((run / "seen.json").exists, "the batch step")
    seen: dict[str, Any] = json.loads((run / "seen.json").read_text())
    return seen


def test_real_job_has_its_components_its_environment_and_ends_in_good_order(
    cluster: Cluster, shared: Path, testbed: Testbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if submitted from within another job and another MPI program.
    for name in (
        "SLURM_JOB_ID",
        "SLURM_CPU_BIND",
        "SBATCH_PARTITION",
        "SLURM_ARRAY_JOB_ID",
        "PMIX_RANK",
        "OMPI_X",
    ):
        monkeypatch.setenv(name, "1")
    cluster = cluster.model_copy(
        update={"environment": {"GREETING": "it's $HOME"}, "setup": ["export SETUP=done"]}
    )
    result = send(config_in(shared), cluster)
    run, job = result.run_dir, result.job.job
    seen = at_work(run)
    env = seen["env"]
    assert (env["SLURM_JOB_ID"], env["SLURM_HET_SIZE"], env["GREETING"], env["SETUP"]) == (
        str(job),
        "3",
        "it's $HOME",
        "done",
    )
    assert not {"SLURM_CPU_BIND", "SBATCH_PARTITION", "SLURM_ARRAY_JOB_ID", "PMIX_RANK", "OMPI_X"} & set(env)
    assert (seen["host"], seen["cwd"]) == ("h100-1", os.getcwd())

    state = Queue(job).state()
    assert [(part.partition, part.nodes, part.phase) for part in state.parts] == [
        ("h100", 1, Phase.RUNNING), ("h20", 1, Phase.RUNNING), ("cpu", 1, Phase.RUNNING),
    ]  # fmt: skip
    shown = testbed.run("scontrol", "--oneliner", "show", "job", str(job)).stdout.splitlines()
    assert "gres:gpu:h100:1" in shown[0] and "gres:gpu:h20:1" in shown[1] and "gres" not in shown[2]
    assert all("Requeue=1" in line and "TimeLimit=00:05:00" in line for line in shown)

    status = Watcher(run).look()
    assert (status.verdict, status.exit_code, status.requeues) == ("starting", 0, 0)
    assert all(part.time_left_s and part.state == "RUNNING" for part in status.components)
    with pytest.raises(Exception, match=f"job {job} of this run is still running"):
        submit.resubmit(run, cluster)

    # The signal reaches the batch step's own process, since the script has become it.
    said: list[str] = []
    assert cancel.cancel(run, say=said.append)
    assert said[-1] == f"job {job} has stopped"
    out: list[bytes] = []
    follow.follow(run, Choice(), 0, out.append)
    text = b"".join(out).decode()
    assert "the stand-in is at work" in text and "stopped by ['SIGTERM']" in text
    assert Watcher(run).look().verdict == "stopped"
    assert not cancel.cancel(run, say=said.append)

    (run / "seen.json").unlink()
    again = submit.resubmit(run, book.load_resolved_cluster(run))
    assert not book.is_cancelled(run)
    assert at_work(run)["env"]["SLURM_JOB_ID"] == str(again.job.job)
    assert cancel.cancel(run, now=True, say=said.append)
    assert said[-1] == f"job {again.job.job} is cancelled"


def test_job_that_has_to_wait_says_why_and_is_cancelled_before_it_starts(
    cluster: Cluster, shared: Path
) -> None:
    held = cluster.model_copy(update={"options": {"hold": True}})
    result = send(config_in(shared), held)
    status = Watcher(result.run_dir).look()
    assert (status.verdict, {part.reason for part in status.components}) == (
        "waiting",
        {"JobHeldUser"},
    )
    assert "scontrol release" in status.components[0].explanation
    said: list[str] = []
    assert cancel.cancel(result.run_dir, say=said.append)
    assert said == [f"ending job {result.job.job} at once", f"job {result.job.job} is cancelled"]
    assert Watcher(result.run_dir).look().verdict == "stopped"


@pytest.mark.parametrize(
    ("change", "profile", "words"),
    [
        ({}, ["partitions.cpu.partition=broken"], "Slurm's partition broken is DOWN"),
        ({}, ["partitions.cpu.partition=nix"], "Slurm has no partition nix"),
        ({"generate": {"nodes": 3}}, [], "3 nodes, but Slurm's partition h20 has 2; use fewer"),
        ({}, ["time=2d"], "runs jobs of at most 1-00:00:00; ask for less with --time"),
        ({"trainer": {"gpus_per_rank": 3}}, ["partitions.h100.gpus_per_node=9"], "sinfo -o '%P %D"),
        ({}, ["partitions.h20.gres='gpu:b900:{count}'"], "Requested node configuration is not available"),
        ({}, [f"partitions.{name}.memory=900G" for name in ("h100", "h20", "cpu")], "ask for less memory"),
        ({}, [f"partitions.{name}.constraint=fast" for name in ("h100", "h20", "cpu")], "sinfo -o '%P %f'"),
        ({}, ["reservation=mine"], "-c reservation=null"),
    ],
)  # fmt: skip
def test_what_slurm_refuses_or_would_never_start_is_told_and_leaves_nothing(
    cluster: Cluster, shared: Path, change: dict[str, Any], profile: list[str], words: str
) -> None:
    with pytest.raises((ConfigError, SlurmError)) as caught:
        send(config_in(shared, **change), load_cluster("testbed", ["time=5m", *profile]))
    assert words in str(caught.value)
    assert os.listdir(shared) == []


def test_the_script_of_a_dry_run_is_what_slurm_takes(
    cluster: Cluster, shared: Path, testbed: Testbed
) -> None:
    path = shared / "job.sh"
    path.write_text(
        submit.script(
            config_in(shared),
            with_choices(cluster, account=None, qos=None, time="10:00"),
            shared=True,
        )
    )
    done = testbed.run("sbatch", "--test-only", str(path))
    assert done.returncode == 0, done.stderr
    assert "using 4 processors on " in done.stderr


def test_verbs_on_the_command_line(cluster: Cluster, shared: Path, testbed: Testbed) -> None:
    run = send(config_in(shared), cluster).run_dir
    at_work(run)

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return testbed.run(sys.executable, "-m", "hpc_rollart", *args, timeout=120)

    status = json.loads(call("status", str(run), "--json").stdout)
    assert [part["state"] for part in status["components"]] == ["RUNNING"] * 3
    line = [sys.executable, "-m", "hpc_rollart", "logs", str(run), "-f"]
    with subprocess.Popen(line, env=testbed.env, stdout=subprocess.PIPE, text=True) as following:
        done = call("cancel", str(run))
        assert done.returncode == 0 and done.stdout.endswith("has stopped\n")
        try:
            text, _ = following.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            following.send_signal(signal.SIGKILL)
            raise
    assert following.returncode == 0 and "stopped by ['SIGTERM']" in text
    assert call("status", str(run)).returncode == 130
