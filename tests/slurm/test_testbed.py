"""The testbed is a cluster of several hosts, breaks as it is told to, and leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.testbed import cli, conf, network, processes
from slurm.testbed.settings import DEFAULT_NODES, Node, Settings, TestbedError, load, parse_nodes, shares_for
from tests.slurm.conftest import ROOT, MakeTestbed, Testbed, require_slurm

HET_JOB = """#!/bin/bash
#SBATCH --partition=h100 --nodes=1 --gres=gpu:1 --time=5 --output={out}
#SBATCH hetjob
#SBATCH --partition=h20 --nodes=2 --ntasks-per-node=1 --gres=gpu:2
#SBATCH hetjob
#SBATCH --partition=cpu --nodes=2 --ntasks-per-node=1
srun --het-group=0-2 --label bash -c 'echo "$(hostname) $SLURM_JOB_PARTITION"'
echo finished
"""


def settled(met: Callable[[], bool], what: str, deadline_s: float = 60) -> None:
    """Wait until something holds."""
    start = time.monotonic()
    while not met():
        assert time.monotonic() - start < deadline_s, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def own(make_testbed: MakeTestbed) -> Testbed:
    """A testbed that only this file uses, so that no other test's jobs are hit."""
    return make_testbed("--down-after", "30")


def srun(testbed: Testbed, *arguments: str) -> str:
    done = testbed.run("srun", "--partition=low", "--time=2", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def node_processes(testbed: Testbed, name: str) -> list[int]:
    chosen = load(testbed.dir)
    assert chosen is not None
    return processes.in_namespace(network.namespace_path(chosen, chosen.node(name)))


def state(testbed: Testbed, name: str) -> str:
    return testbed.run(
        "sinfo", "--noheader", "--nodes", name, "--partition=low", "--format=%T"
    ).stdout.strip()


# -- a cluster --


def test_the_shared_testbed_runs_jobs(testbed: Testbed) -> None:
    assert testbed.shared.is_dir()
    assert srun(testbed, "--nodes=1", "cat", "/proc/sys/kernel/hostname").strip() in {
        n.name for n in DEFAULT_NODES
    }


def test_a_second_up_says_that_it_is_up_and_changes_nothing(own: Testbed) -> None:
    before = {pid for node in DEFAULT_NODES for pid in node_processes(own, node.name)}
    said = own.must("up")
    assert "is up already" in said
    assert said.splitlines()[-1] == f"export SLURM_CONF={own.dir}/etc/slurm.conf"
    assert {pid for node in DEFAULT_NODES for pid in node_processes(own, node.name)} == before


def test_two_ups_at_once_make_one_testbed(own: Testbed) -> None:
    own.must("down")
    command = [sys.executable, "-m", "slurm.testbed", "up"]
    both = [subprocess.Popen(command, env=own.env, cwd=ROOT, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    names = [processes.name(pid) for pid in processes.marked(own.dir)]
    assert (names.count("munged"), names.count("slurmctld")) == (1, 1)


def test_env_is_for_eval(own: Testbed) -> None:
    script = f'eval "$({sys.executable} -m slurm.testbed env --dir {own.dir})"; sinfo --noheader --format=%R'
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) == {"h100", "h20", "cpu", "low", "broken"}, done.stderr


@pytest.mark.parametrize("name", [node.name for node in DEFAULT_NODES])
def test_every_node_is_a_host_with_its_own_name(own: Testbed, name: str) -> None:
    assert srun(own, f"--nodelist={name}", "hostname") == f"{name}\n"


def test_tmp_and_shm_are_private_and_the_shared_folder_is_not(own: Testbed) -> None:
    for place in ("/tmp", "/dev/shm", str(own.shared)):
        srun(own, "--nodelist=h20-1", "touch", f"{place}/seen-{own.dir.name}")
    look = f"ls -d {{/tmp,/dev/shm,{own.shared}}}/seen-{own.dir.name} 2>/dev/null; true"
    assert srun(own, "--nodelist=h20-2", "bash", "-c", look).split() == [f"{own.shared}/seen-{own.dir.name}"]


def test_nodes_see_the_checkout_and_each_other(own: Testbed) -> None:
    assert srun(own, "--nodelist=cpu-1", "ls", str(ROOT / "Makefile")).strip() == str(ROOT / "Makefile")
    assert "h100-1" in srun(own, "--nodelist=cpu-1", "getent", "hosts", "h100-1")


def test_partitions_and_gpus_are_as_announced(own: Testbed) -> None:
    listing = own.run("sinfo", "--noheader", "--exact", "--format=%R %a %D %G").stdout
    assert set(listing.splitlines()) == {
        "h100 up 1 gpu:h100:2",
        "h20 up 2 gpu:h20:2",
        "cpu up 2 (null)",
        "low up 1 gpu:h100:2",
        "low up 2 gpu:h20:2",
        "low up 2 (null)",
        "broken down 1 (null)",
    }


def test_a_step_sees_the_gpus_that_it_was_given(own: Testbed) -> None:
    show = ["bash", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert srun(own, "--nodelist=h20-1", "--gres=gpu:h20:2", *show) == "0,1\n"
    assert srun(own, "--nodelist=h100-1", "--gres=gpu:1", *show) in ("0\n", "1\n")
    refused = own.run("srun", "--partition=cpu", "--gres=gpu:1", "true")
    assert refused.returncode != 0


def test_jobs_without_a_memory_request_share_a_node(own: Testbed) -> None:
    submit = [
        "sbatch",
        "--parsable",
        "--partition=low",
        "--nodelist=cpu-1",
        "--ntasks=1",
        "--output=/dev/null",
    ]
    ids = [own.run(*submit, "--wrap=sleep 60").stdout.strip() for _ in range(3)]

    def running() -> list[str]:
        return own.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").stdout.split()

    settled(lambda: set(ids) <= set(running()), "three jobs run side by side")
    assert own.run("scancel", *ids).returncode == 0
    settled(lambda: state(own, "cpu-1") == "idle", "cpu-1 is idle again")


def test_a_heterogeneous_job_runs_over_all_kinds_of_nodes(own: Testbed) -> None:
    script, out = own.shared / "het.sh", own.shared / "het.out"
    script.write_text(HET_JOB.format(out=out))
    submitted = own.run("sbatch", str(script))
    assert submitted.returncode == 0, submitted.stderr
    settled(lambda: out.exists() and "finished" in out.read_text(), "the job is over")
    hosts = {line.split()[1] for line in out.read_text().splitlines() if ":" in line}
    assert hosts == {node.name for node in DEFAULT_NODES}


def test_commands_on_a_node_find_the_cluster_without_an_environment(own: Testbed) -> None:
    said = srun(own, "--nodelist=cpu-1", "env", "-i", "/usr/bin/sinfo", "--noheader", "--format=%R")
    assert "broken" in said


# -- breaking it --


def test_kill_ends_all_of_a_node_and_start_brings_it_back(own: Testbed) -> None:
    srun(own, "--nodelist=h20-2", "touch", "/tmp/from-before")
    starts = own.shared / "starts"
    wrap = f"--wrap=echo >> {starts}; sleep 600"
    job = own.run("sbatch", "--parsable", "--partition=h20", "--nodelist=h20-2", "--output=/dev/null", wrap)
    settled(lambda: len(node_processes(own, "h20-2")) > 2, "the job runs")
    own.node("kill", "h20-2")
    assert node_processes(own, "h20-2") == []
    assert own.verb("status").returncode == 1
    own.node("start", "h20-2")
    settled(lambda: starts.read_text() == "\n\n", "the job that died starts again")
    own.run("scancel", job.stdout.strip())
    assert srun(own, "--nodelist=h20-2", "hostname") == "h20-2\n"
    assert "from-before" not in srun(own, "--nodelist=h20-2", "ls", "/tmp")
    own.must("status")


def test_pause_stops_all_of_a_node_and_resume_lets_it_go_on(own: Testbed) -> None:
    own.node("pause", "h20-1")
    paused = node_processes(own, "h20-1")
    assert paused and {processes.state(pid) for pid in paused} == {"T"}
    assert "paused" in own.verb("status").stdout
    own.node("resume", "h20-1")
    assert node_processes(own, "h20-1") == paused
    assert srun(own, "--nodelist=h20-1", "hostname") == "h20-1\n"


def test_a_cut_node_is_given_up_by_slurm_and_mended(own: Testbed) -> None:
    own.node("cut", "cpu-1")
    settled(lambda: state(own, "cpu-1").startswith("down"), "Slurm notices", deadline_s=120)
    assert "cut" in own.verb("status").stdout
    own.node("mend", "cpu-1")
    assert srun(own, "--nodelist=cpu-1", "hostname") == "cpu-1\n"


def test_up_mends_what_is_broken(own: Testbed) -> None:
    own.node("kill", "cpu-2")
    own.node("pause", "h20-1")
    own.node("cut", "h20-2")
    assert "mended: h20-1, h20-2, cpu-2" in own.must("up")
    own.must("status")


def test_up_starts_anew_after_a_crash_of_the_head(own: Testbed) -> None:
    before = own.run("sbatch", "--parsable", "--partition=cpu", "--output=/dev/null", "--wrap=true")
    for pid in processes.marked(own.dir):
        os.kill(pid, signal.SIGKILL)
    settled(lambda: processes.marked(own.dir) == [], "the head is gone")
    assert own.verb("status").returncode == 1
    own.must("up")
    after = own.run("sbatch", "--parsable", "--partition=cpu", "--output=/dev/null", "--wrap=true")
    assert int(after.stdout) > int(before.stdout), "an id must never mean two jobs"


def test_down_leaves_nothing_but_files_and_can_be_repeated(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed("--nodes", "b-1:cpu,a-1:gpus:h20")
    chosen = load(testbed.dir)
    assert chosen is not None
    for node in ("b-1", "a-1"):
        wrap = "--wrap=setsid sleep 987 & sleep 987"
        testbed.run("sbatch", "--partition=low", f"--nodelist={node}", "--output=/dev/null", wrap)
    settled(lambda: all(len(node_processes(testbed, n)) > 3 for n in ("b-1", "a-1")), "the jobs run")
    pids = [pid for name in ("b-1", "a-1") for pid in node_processes(testbed, name)]
    pids += processes.marked(testbed.dir)
    (testbed.shared / "result").touch()
    assert "is down" in testbed.must("down")
    assert [pid for pid in pids if processes.state(pid) not in ("", "Z")] == []
    assert network.namespaces(chosen.bridge) == []
    assert [link for link in os.listdir("/sys/class/net") if link.startswith(chosen.bridge)] == []
    assert str(testbed.dir) not in Path("/proc/mounts").read_text()
    assert (testbed.shared / "result").exists()
    testbed.must("down")
    assert "is down" in testbed.verb("status").stdout
    testbed.must("down", "--purge")
    assert not testbed.dir.exists()
    assert "no testbed" in testbed.must("down")


# -- refusals --


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_an_unknown_node_is_refused_by_name(own: Testbed) -> None:
    refused(own.verb("kill", "h200-1"), "h200-1", "h100-1, h20-1, h20-2, cpu-1, cpu-2")


def test_other_options_for_a_testbed_that_is_up_are_refused(own: Testbed) -> None:
    refused(own.verb("up", "--subnet", "198.18.0.0/16"), "--subnet", "take it down first")


def test_a_name_or_network_of_somebody_else_is_refused(own: Testbed, tmp_path: Path) -> None:
    chosen = load(own.dir)
    assert chosen is not None
    refused(own.verb("up", "--dir", str(tmp_path), "--bridge", chosen.bridge), str(own.dir), "--bridge")
    taken = ["--bridge", "tother", "--subnet", chosen.subnet]
    refused(own.verb("up", "--dir", str(tmp_path), *taken), chosen.head_address, "--subnet")
    own.must("status")


def test_a_directory_with_other_things_in_it_is_left_alone(own: Testbed, tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "precious").touch()
    for verb in (["up"], ["down", "--purge"]):
        refused(own.verb(*verb, "--dir", str(tmp_path)), str(tmp_path), "--dir")
    assert (tmp_path / "etc" / "precious").exists()


def test_a_verb_for_a_testbed_that_is_not_there_is_refused(own: Testbed, tmp_path: Path) -> None:
    for verb in (["status"], ["env"], ["kill", "cpu-1"]):
        refused(own.verb(*verb, "--dir", str(tmp_path / "none")), "no testbed", "up")


def test_others_than_root_are_told_so(own: Testbed) -> None:
    # Python is loaded as root, as it may lie where others cannot read.
    script = "import os, sys; from slurm.testbed.cli import main; os.setuid(65534); sys.exit(main(['up']))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    refused(done, "root", "sudo")


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, **_: None if "slurm" in program else program)
    assert cli.missing() == (
        "the testbed needs root and Slurm: apt-get install --no-install-recommends "
        "slurm-wlm-basic-plugins slurmctld slurmd (and libpmix-dev, for srun --mpi=pmix only)"
    )


def test_without_slurm_tests_are_skipped_but_fail_where_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cli, "missing", lambda: "get Slurm")
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("ROLLART_REQUIRE_SLURM", raising=False)
    with pytest.raises(pytest.skip.Exception, match="get Slurm"):
        require_slurm()
    monkeypatch.setenv("ROLLART_REQUIRE_SLURM", "1")
    with pytest.raises(pytest.fail.Exception, match="get Slurm"):
        require_slurm()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dir": Path("/var/with space")}, "--dir"),
        ({"dir": Path("/" + "long/" * 25)}, "too long"),
        ({"bridge": "a-name-that-is-long"}, "--bridge"),
        ({"subnet": "10.0.0.0/28"}, "--subnet"),
        ({"subnet": "nonsense"}, "--subnet"),
        ({"nodes": ()}, "--nodes"),
        ({"nodes": (Node("a", "low"),)}, "low"),
        ({"nodes": (Node("a", "cpu"), Node("a", "cpu"))}, "twice"),
    ],
)
def test_settings_that_cannot_work_name_their_option(change: dict[str, object], word: str) -> None:
    with pytest.raises(TestbedError, match=word):
        Settings(**({"dir": Path("/var/lib/x")} | change))  # type: ignore[arg-type]


# -- what it is made of --


def test_settings_come_back_as_they_were_saved(tmp_path: Path) -> None:
    saved = Settings(dir=tmp_path, nodes=parse_nodes("x:cpu,y:fast:h20"), shares=("/tmp/a",), starts=3)
    saved.save()
    assert load(tmp_path) == saved
    saved.file.write_text(json.dumps({"bridge": 1}))
    with pytest.raises(TestbedError, match="damaged"):
        load(tmp_path)


def test_shares_are_below_tmp_and_said_once(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    if Path("/tmp") in tmp_path.parents:
        assert str(inner) not in shares_for(Path("/var/lib/x"), [str(inner), str(tmp_path)])
        assert str(tmp_path) in shares_for(Path("/var/lib/x"), [str(inner), str(tmp_path)])
    with pytest.raises(TestbedError, match="not below /tmp"):
        shares_for(Path("/var/lib/x"), ["/usr"])
    with pytest.raises(TestbedError, match="no such directory"):
        shares_for(Path("/var/lib/x"), ["/tmp/not/there"])


def test_node_names_do_not_sort_as_components_do() -> None:
    # On Slurm 22.05 an MPI over het components works for sorted names only; a testbed must not hide that.
    names = [node.name for node in DEFAULT_NODES]
    assert names != sorted(names)


def test_preemption_leaves_jobs_time_to_save() -> None:
    text = conf.slurm_conf(Settings(dir=Path("/var/lib/x")))
    (low,) = [line for line in text.splitlines() if line.startswith("PartitionName=low")]
    assert f"GraceTime={conf.GRACE_S}" in low and "PreemptMode=REQUEUE" in low
