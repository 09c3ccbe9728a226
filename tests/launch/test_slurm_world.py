"""How ranks are started in a job: commands, environments, GPUs, and the shield against signals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_rollart.config.cluster import load_cluster
from hpc_rollart.config.layout import blocks
from hpc_rollart.errors import LaunchError, RunFailed
from hpc_rollart.jobs import commands
from hpc_rollart.jobs.commands import SlurmError, clean_environment
from hpc_rollart.launch import agent, shield
from hpc_rollart.launch.allocation import Allocation, Group
from hpc_rollart.launch.attempt import Attempt
from hpc_rollart.launch.gpus import show_own_gpus
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.slurm_world import MpirunLauncher, refuse_node_order, scratch_base
from tests.launch.conftest import make_config


def allocation(*hosts: tuple[str, ...]) -> Allocation:
    names = ("env", "trainer", "generate")
    return Allocation(
        "7", tuple(Group(n, i, h, str(7 + i)) for i, (n, h) in enumerate(zip(names, hosts, strict=True)))
    )


def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Allocation) -> MpirunLauncher:
    attempt = Attempt(0)
    attempt.write(tmp_path)
    return MpirunLauncher(
        make_config(tmp_path), load_cluster("testbed"), where, RunDir(tmp_path, "id"), attempt
    )


def test_each_component_goes_to_its_own_nodes_and_the_agent_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = launcher(tmp_path, monkeypatch, allocation(("c1",), ("h1",), ("g1",)))
    line = made.command(make_config(tmp_path), [sys.executable, "-m", "rank"])
    apps = " ".join(line).split(" : ")
    assert "--host c1:2" in apps[0] and "--host h1:1" in apps[1] and "--host g1:1" in apps[2]
    assert "ROLLART_COMPONENT=generate" in apps[2] and "OMP_NUM_THREADS=2" in apps[2]
    hostfile = (tmp_path / "logs" / "0" / "hostfile").read_text()
    assert hostfile == "c1 slots=2\nh1 slots=1\ng1 slots=1\n"
    nodes = json.loads((tmp_path / "logs" / "0" / "nodes.json").read_text())
    assert nodes["hosts"]["g1"] == {"group": 2, "cpus": 2}


def test_a_node_that_two_components_share_is_refused_with_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = launcher(tmp_path, monkeypatch, allocation(("n1",), ("n1",), ("g1",)))
    with pytest.raises(LaunchError, match=r"node n1 was given to components env and trainer.*whole_nodes"):
        made.command(make_config(tmp_path), [sys.executable, "-m", "rank"])


def test_steps_get_neither_this_nodes_gpus_nor_the_jobs_variables() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_NTASKS": "9", "SLURM_CONF": "/etc/s", "PATH": "/bin"}
    assert agent.step_environment(base, "7") == {"SLURM_CONF": "/etc/s", "PATH": "/bin", "SLURM_JOB_ID": "7"}
    assert clean_environment(base | {"PMIX_RANK": "1", "OMPI_X": "1"}).keys() == {
        "CUDA_VISIBLE_DEVICES", "SLURM_CONF", "PATH",
    }  # fmt: skip


def test_srun_is_refused_only_where_this_slurm_confuses_the_ranks() -> None:
    refuse_node_order(["h20-1", "h100-1"], ["h20-1", "h100-1"], (22, 5))
    refuse_node_order(["h100-1", "cpu-1"], ["cpu-1", "h100-1"], (24, 11))
    with pytest.raises(LaunchError, match=r"Slurm 22\.05 .*its order is cpu-1, h100-1"):
        refuse_node_order(["h100-1", "cpu-1"], ["cpu-1", "h100-1"], (22, 5))


def test_scratch_may_be_a_variable_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster("testbed").model_copy(update={"scratch": "$LOCAL/x"})
    monkeypatch.delenv("LOCAL", raising=False)
    with pytest.raises(LaunchError, match=r"\$LOCAL is not set"):
        scratch_base(cluster)
    (tmp_path / "x").mkdir()
    monkeypatch.setenv("LOCAL", str(tmp_path))
    assert scratch_base(cluster) == tmp_path / "x"


def gpus(given: str, vendor: str = "nvidia", each: int = 2) -> list[dict[str, str]]:
    """What the two generator ranks of one node see when Slurm gave the node `given`."""
    config = make_config(Path("/nowhere"))
    part = config.components["generate"].model_copy(update={"gpus_per_rank": each, "ranks_per_node": 2})
    block = next(b for b in blocks(config) if b.component == "generate")
    seen = []
    for rank in (block.first, block.first + 1):
        env = {name: given for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")}
        show_own_gpus(env, part, block, rank, vendor)
        seen.append(env)
    return seen


def test_ranks_of_a_node_share_its_gpus_in_rank_order_by_one_variable() -> None:
    assert gpus("0,1,2,3") == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert gpus("4,5,6,7", "amd") == [{"ROCR_VISIBLE_DEVICES": "4,5"}, {"ROCR_VISIBLE_DEVICES": "6,7"}]
    assert gpus("0,1", each=0) == [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}]


def test_too_few_gpus_are_said_with_the_key() -> None:
    with pytest.raises(
        RunFailed, match=r"needs 2 GPUs \(components\.generate\.gpus_per_rank\).* share 3: 0, 1, 2"
    ):
        gpus("0,1,2")


def test_a_shielded_process_does_not_see_the_signal_that_it_handles() -> None:
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        try:
            assert shield.block_when_handled(process.pid, [signal.SIGTERM], 20)
            process.terminate()
            pending = int(_status(process.pid, "ShdPnd"), 16)
            assert pending & 1 << (signal.SIGTERM - 1) and process.poll() is None
        finally:
            process.kill()


def test_a_process_that_never_handles_the_signal_is_not_waited_for_longer_than_said() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not shield.block_when_handled(process.pid, [signal.SIGTERM], 0.2)
        finally:
            process.kill()


def _status(pid: int, name: str) -> str:
    for _ in range(100):  # the signal is on its way
        text = Path(f"/proc/{pid}/status").read_text()
        value = next(line.split()[1] for line in text.splitlines() if line.startswith(name))
        if int(value, 16):
            return value
        time.sleep(0.02)
    return "0"


def test_a_slurm_conf_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    with pytest.raises(SlurmError, match=r"SLURM_CONF names /nowhere/slurm\.conf, which is no file here"):
        commands.run(["squeue"])
