"""The batch script: its exact text, one set of options a component, and what does not fit a cluster."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpc_rollart.config import ConfigError, load
from hpc_rollart.config.cluster import Cluster, load_cluster
from hpc_rollart.jobs.commands import clean_environment
from hpc_rollart.launch import sitecheck, submit
from hpc_rollart.launch.batch import Batch, HetComponent
from hpc_rollart.launch.placement import place, seconds_of, slurm_time, with_choices
from tests.launch.site import FakeSlurm, make_cluster, make_run

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without anything in it that a script could name."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(config: Any, cluster: Cluster, here: Path) -> str:
    text = submit.script(config, cluster, shared=True)
    return re.sub(r"hpc_rollart \d\S*:", "hpc_rollart VERSION:", text.replace(str(here), "/home/me"))


SITE: dict[str, Any] = {
    "account": "proj7",
    "modules": ["gcc/13", "cuda/12.4"],
    "setup": ["ulimit -c 0", "export SCRATCH=$WORK/tmp"],
    "environment": {"NCCL_SOCKET_IFNAME": "hsn", "GREETING": "it's $HOME"},
    "options": {"hint": "nomultithread"},
}


@pytest.mark.parametrize("name", ["testbed", "site", "perlmutter"])
def test_batch_script_is_the_golden_one(name: str, here: Path) -> None:
    config = make_run(here)
    if name == "site":
        cluster = make_cluster(**SITE)
    else:
        cluster = load_cluster(
            str(ROOT / "conf" / "cluster" / f"{name}.yaml"), ["python=/sw/rollart/bin/python"]
        )
        cluster = with_choices(cluster, account="m1234", qos=None, time="12:00:00")
        # The testbed's nodes are small, and Perlmutter has one kind of GPU.
        small = {"ranks_per_node": 2, "cpus_per_rank": 2}
        other = {"gpu": "h100" if name == "testbed" else "a100", "cpus_per_rank": 2}
        config = make_run(
            here, trainer={"cpus_per_rank": 4}, generate_compute=other, generate_bandwidth=small, env=small
        )
    text = script(config, cluster, here)
    path = GOLDEN / f"{name}.sh"
    assert text == path.read_text(), f"if this is meant, write it to {path}"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sh")), ids=lambda path: path.name)
def test_golden_script_is_shell_with_all_options_before_the_first_command(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    lines = path.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    assert lines[-1].startswith("exec ")


def test_script_runs_setup_and_quotes_values_and_clears_what_was_inherited(tmp_path: Path) -> None:
    part = HetComponent("x", {"nodes": 1})
    batch = Batch(["x"], {}, [part], ["no/such"], ['echo "setup $A"'], {"B": "it's $HOME"})
    file = tmp_path / "x.sh"
    file.write_text(batch.text("env"))
    env = {
        "PATH": "/usr/bin:/bin",
        "A": "1",
        "PMIX_RANK": "0",
        "OMPI_X": "1",
        "SLURM_CPU_BIND_TYPE": "x",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", file], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "setup 1"
    assert {"B=it's $HOME", "SLURM_JOB_ID=7", "SUBMITIT_EXECUTOR=slurm"} <= set(lines)
    assert not [line for line in lines if line.startswith(("PMIX_", "OMPI_", "SLURM_CPU_BIND"))]
    # A node without a module command says so and goes on.
    if "not loaded: no/such" not in done.stderr:
        assert "module" in done.stderr


def test_a_module_that_cannot_be_loaded_ends_the_job(tmp_path: Path) -> None:
    batch = Batch(["x"], {}, [HetComponent("x", {})], ["no/such"], [])
    file = tmp_path / "x.sh"
    file.write_text(batch.text("echo went on"))
    code = f'module() {{ [ "$1" = purge ]; }}; export -f module; bash --norc {file}'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (1, "")


def test_environment_for_slurm_keeps_where_the_cluster_is_and_drops_the_outer_job() -> None:
    base = {
        "SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "a", "HOME": "/h", "SLURM_JOB_ID": "1",
        "SBATCH_ACCOUNT": "x", "SLURM_ARRAY_JOB_ID": "3", "PMIX_RANK": "0", "OMPI_COMM_WORLD_RANK": "0",
        "SUBMITIT_FOLDER": "x", "PRTE_X": "1", "SRUN_DEBUG": "1", "PMI_RANK": "0", "SQUEUE_FORMAT": "x",
    }  # fmt: skip
    assert clean_environment(base) == {"SLURM_CONF": "/etc/x", "SLURM_CLUSTERS": "a", "HOME": "/h"}


# --- options -----------------------------------------------------------------------------------------


def options(cluster: Cluster, tmp_path: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    return {part.component: part.options for part in place(make_run(tmp_path, **changes), cluster)}


def test_each_component_has_its_own_partition_nodes_ranks_cores_and_gpus(tmp_path: Path) -> None:
    found = options(make_cluster(), tmp_path)
    assert list(found) == ["trainer", "generate-compute", "generate-bandwidth", "env"]
    picked = ("partition", "nodes", "ntasks-per-node", "cpus-per-task", "gres")
    assert [found["generate-bandwidth"][key] for key in picked] == ["gpu-h20", 2, 8, 12, "gpu:h20:8"]
    assert [found["generate-compute"][key] for key in picked] == ["gpu-h100", 1, 2, 8, "gpu:h100:2"]
    assert "gres" not in found["env"]


def test_ranks_without_gpus_ask_for_none_on_a_gpu_partition(tmp_path: Path) -> None:
    assert "gres" not in options(make_cluster(), tmp_path, trainer={"gpus_per_rank": 0})["trainer"]


def test_whole_nodes_are_exclusive_and_come_with_all_their_gpus(tmp_path: Path) -> None:
    parts = make_cluster().model_dump()["partitions"]
    parts["big"]["whole_nodes"] = True
    trainer = options(make_cluster(partitions=parts), tmp_path)["trainer"]
    assert (trainer["exclusive"], trainer["gres"]) == (True, "gpu:h100:4")
    parts["big"]["gres"] = None
    assert not {"gres", "gpus-per-node"} & set(options(make_cluster(partitions=parts), tmp_path)["trainer"])


def test_warning_goes_to_the_batch_step_alone_and_only_if_the_site_lets_one_ask(tmp_path: Path) -> None:
    assert options(make_cluster(), tmp_path)["env"]["signal"] == "B:USR2@180"
    assert options(make_cluster(signal={"name": "TERM"}), tmp_path)["env"]["signal"] == "B:TERM@180"
    assert "signal" not in options(make_cluster(signal={"request": False}), tmp_path)["env"]


def test_a_site_that_forbids_requeueing_gets_no_requeue(tmp_path: Path) -> None:
    found = options(make_cluster(requeue=False), tmp_path)["env"]
    assert found["no-requeue"] is True and "requeue" not in found


def test_profile_options_come_through_and_a_partition_may_leave_one_out(tmp_path: Path) -> None:
    parts = make_cluster().model_dump()["partitions"]
    parts["cpu"]["options"] = {"hint": False, "switches": 1}
    parts["big"]["options"] = {"switches": 1}
    parts["wide"]["options"] = {"switches": 1}
    with pytest.raises(ConfigError, match=r"partitions\.big sets --hint and partitions\.cpu does not"):
        options(make_cluster(partitions=parts, options={"hint": "nomultithread"}), tmp_path)
    assert options(make_cluster(partitions=parts), tmp_path)["env"]["switches"] == 1


def test_an_option_that_a_later_component_would_inherit_is_refused(tmp_path: Path) -> None:
    parts = make_cluster().model_dump()["partitions"]
    parts["big"]["memory"] = "64G"
    with pytest.raises(ConfigError, match=r"sets --mem and partitions\.wide does not; Slurm would give"):
        options(make_cluster(partitions=parts), tmp_path)
    parts["wide"]["memory"] = parts["cpu"]["memory"] = "0"
    assert options(make_cluster(partitions=parts), tmp_path)["env"]["mem"] == "0"


def test_account_of_the_command_line_is_for_all_and_made_into_the_partitions_form(tmp_path: Path) -> None:
    parts = make_cluster().model_dump()["partitions"]
    parts["big"]["account"], parts["wide"]["account"], parts["cpu"]["qos"] = "{account}_g", "other", "slow"
    cluster = make_cluster(partitions=parts, account="mine", qos="normal")
    assert [part["account"] for part in options(cluster, tmp_path).values()] == [
        "mine_g",
        "mine_g",
        "other",
        "mine",
    ]
    assert options(cluster, tmp_path)["env"]["qos"] == "slow"
    chosen = with_choices(cluster, account="p2", qos="debug", time="30m")
    found = options(chosen, tmp_path)
    assert [part["account"] for part in found.values()] == ["p2_g", "p2_g", "p2", "p2"]
    assert {part["qos"] for part in found.values()} == {"debug"}
    assert found["env"]["time"] == "00:30:00"


@pytest.mark.parametrize("bad", ["", "a b", "x;rm", "$(id)", "\udcff", "x" * 100_000])
@pytest.mark.parametrize("key", ["account", "qos"])
def test_account_that_is_no_word_is_refused(key: str, bad: str) -> None:
    choices = {"account": None, "qos": None, "time": None} | {key: bad}
    with pytest.raises(ConfigError, match=f"--{key}: '.*' is no name of one") as caught:
        with_choices(make_cluster(), **choices)
    assert len(str(caught.value)) < 120


# --- what does not fit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "profile", "line"),
    [
        ({"trainer": {"partition": "fat"}}, {}, "components.trainer: there is no partition 'fat'"),
        ({"trainer": {"gpu": "a100"}}, {}, "components.trainer: no partition has GPU type 'a100'; types: "),
        ({"trainer": {"gpu": "h20", "partition": "big"}}, {}, "components.trainer.gpu: partition big has "),
        ({"trainer": {"partition": "cpu"}}, {}, "components.trainer.gpus_per_rank: partition cpu has no "),
        ({"trainer": {"gpus_per_rank": 5}}, {}, "components.trainer.gpus_per_rank: 1 x 5 GPUs, but a "),
        ({"trainer": {"cpus_per_rank": 65}}, {}, "components.trainer.cpus_per_rank: 1 x 65 cores, but a "),
        ({"generate_compute": {"nodes": 9}}, {}, "components.generate-compute.nodes: 9, but a job may "),
        ({}, {"time": "2d"}, "components.trainer.partition: big runs jobs of at most 1-00:00:00"),
        ({}, {"time": "2m"}, "launch.stop_lead_s: 180 s before the end is no less than the whole "),
        ({}, {"time": "2m", "signal": {"request": False}}, "launch.stop_lead_s: 180 s before the end is "),
        ({}, {"account_needed": True}, "cluster: the site refuses jobs without an account; "),
        ({}, {"het": False}, "cluster: this one takes no heterogeneous jobs (het: false), "),
    ],
)  # fmt: skip
def test_run_that_does_not_fit_is_told_the_key_and_the_mend(
    tmp_path: Path, changes: dict[str, Any], profile: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        place(make_run(tmp_path, **changes), make_cluster(**profile))
    assert any(found.startswith(line) for found in caught.value.lines), caught.value.lines


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        place(
            make_run(tmp_path, trainer={"gpus_per_rank": 5}, env={"cpus_per_rank": 99}),
            make_cluster(account_needed=True),
        )
    assert len(caught.value.lines) == 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("12h", 43200),
        ("12:00:00", 43200),
        ("30:00", 1800),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
    ],
)
def test_time_limit_is_read_as_durations_here_and_as_slurms(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "70", "-5", "12:0x", "1:2:3:4", "0:00", "-1:00", "inf", "nan", "1e400", "3651d", "3651-00", "\udcff"]
    + [digits + unit for digits in ("9" * 400, "9" * 5000) for unit in ("", "h", ":00", "-1", ".5d")],
)
def test_time_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time .*: expected a duration .* at most 3650d$") as caught:
        seconds_of(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "00:01:00"), (60, "00:01:00"), (61, "00:02:00"), (86400, "1-00:00:00"), (90061, "1-01:02:00")],
)
def test_time_limit_is_rounded_up_to_slurms_minutes(seconds: float, text: str) -> None:
    assert slurm_time(seconds) == text


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf" / "cluster").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_shipped_profile_makes_a_script(path: Path, here: Path) -> None:
    cluster = with_choices(load_cluster(str(path)), account="proj", qos=None, time=None)
    plain = {"gpus_per_rank": 0, "cpus_per_rank": 1, "ranks_per_node": 1, "gpu": None}
    config = make_run(
        here, trainer=plain, generate_compute=plain, generate_bandwidth=plain, env={"cpus_per_rank": 1}
    )
    if not cluster.het:
        with pytest.raises(ConfigError, match="takes no heterogeneous jobs"):
            submit.script(config, cluster, shared=True)
        return
    assert submit.script(config, cluster, shared=True).count("#SBATCH hetjob") == 3


@pytest.mark.parametrize(
    ("limit", "fits"),
    [("UNLIMITED", True), ("36500-00:00:00", True), ("2:00:00", True), ("1:59:00", False), ("", True)],
)
def test_limit_of_slurms_partition_is_compared_whatever_it_is(tmp_path: Path, limit: str, fits: bool) -> None:
    slurm = FakeSlurm(scontrol=f"PartitionName=x State=UP MaxTime={limit} TotalNodes=9")
    placed = place(make_run(tmp_path), make_cluster())
    assert (sitecheck.partitions(placed, make_cluster(), slurm) == []) == fits


def test_script_is_written_where_the_working_directory_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "\udcff"
    odd.mkdir()
    monkeypatch.chdir(odd)
    assert "--chdir" not in submit.script(make_run(tmp_path), make_cluster(), shared=True)


def test_shipped_run_fits_the_testbed_profile() -> None:
    load_cluster("testbed")
    load(ROOT / "conf" / "quickstart.yaml", here=False)
