"""The doctor: each check with facts made up, real worlds that are well or not, a login node, the table."""

import io
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hpc_rollart.cli import app
from hpc_rollart.config import RunConfig
from hpc_rollart.config.cluster import Cluster
from hpc_rollart.config.schema import Checkpoint
from hpc_rollart.doctor import by_job, examine, here, nodes, probe, results, world
from hpc_rollart.doctor.nodes import GIB, short_checks
from hpc_rollart.doctor.results import Finding, from_line
from hpc_rollart.doctor.world import judge, try_world
from hpc_rollart.errors import UserError
from hpc_rollart.launch.mpirun import LocalLauncher
from hpc_rollart.launch.nodecheck import missing_interface
from hpc_rollart.launch.nodes import NodeReport
from hpc_rollart.launch.placement import place
from tests.launch.conftest import make_config
from tests.launch.site import FakeSlurm, refused

CONFIG = """\
run: {name: small, steps: 2, dir: DIR/run}
model: {builtin: tiny, max_context: 256}
algorithm: {type: grpo}
tasks: [{name: lake, env: frozen-lake}]
components:
  trainer: {role: trainer}
  generate: {role: generator}
  env: {role: env, ranks_per_node: 2}
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """A config of four ranks in a file."""
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG.replace("DIR", str(tmp_path)))
    return path


def read(conf: Path, *overrides: str) -> RunConfig:
    """Return the config as the doctor reads it."""
    return examine.load_unchecked(conf, list(overrides))


def by_check(findings: list[Finding], check: str) -> list[Finding]:
    """Return the findings of one check."""
    return [finding for finding in findings if finding.check == check]


def bad(findings: list[Finding]) -> list[Finding]:
    """Return what is wrong, after seeing that each has its mend."""
    found = [finding for finding in findings if finding.level in ("warn", "fail")]
    assert all(finding.mend for finding in found), found
    return found


# --- nodes, with facts made up -----------------------------------------------------------------------

CLUSTER = Cluster.model_validate(
    {
        "description": "made up",
        "partitions": {
            "gpu": {"partition": "g", "gpu": "h100", "gpus_per_node": 4},
            "cpu": {"partition": "c"},
        },
        "roles": {"trainer": "gpu", "generator": "gpu", "env": "cpu"},
        "interface": "ib0",
    }
)
FACTS: dict[str, Any] = {
    "host": "n1", "t": 0.0, "cpus": 8, "gpus": {"CUDA_VISIBLE_DEVICES": "0,1"}, "run_dir": "", "scratch": "",
    "memory": "", "lock": "", "scratch_lock": "", "see": "", "free_run_dir": 99 * GIB,
    "free_scratch": 99 * GIB, "free_memory": 9 * GIB, "interfaces": ["ib0", "lo"],
    "gpu_names": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"], "hdf5_locking": None,
    "python": "3.11.7", "packages": {"torch": "2.13.0", "mpi4py": "4.1.2"},
}  # fmt: skip


def with_gpus(tmp_path: Path) -> RunConfig:
    """Return the usual config with two GPUs for its trainer."""
    config = make_config(tmp_path)
    trainer = config.components["trainer"].model_copy(update={"gpus_per_rank": 2})
    return config.model_copy(update={"components": {**config.components, "trainer": trainer}})


def report(host: str = "n1", component: str = "trainer", **facts: Any) -> NodeReport:
    """Return a node that is well but for some facts."""
    return NodeReport(host, component, True, "", FACTS | {"host": host} | facts)


def test_nodes_that_are_well_get_one_line_a_check_and_nothing_short(tmp_path: Path) -> None:
    config = with_gpus(tmp_path)
    reports = [report("n1"), report("n2", "env", gpus={}), report("n3", "env", gpus={})]
    found = nodes.node_findings(reports, config, CLUSTER)
    assert bad(found) == []
    assert len({finding.check for finding in found}) == len(found) == len(nodes.CHECKS)
    assert by_check(found, "node answers")[0].where == "3 nodes"
    assert short_checks(reports, config, CLUSTER) == []


@pytest.mark.parametrize(
    ("facts", "check", "level", "text", "mend"),
    [
        ({"run_dir": "/x: No such file"}, "run directory", "fail", "/x: No such file", "run.dir"),
        ({"scratch": "/tmp: Read-only"}, "scratch", "fail", "/tmp: Read-only", "scratch"),
        ({"scratch_lock": "/tmp: Not supported"}, "scratch", "fail", "no file locks", "scratch"),
        ({"free_scratch": 1000}, "scratch space", "warn", "free", "free 1.0 GB"),
        ({"memory": "/dev/shm: Denied"}, "/dev/shm", "fail", "Denied", "/dev/shm"),
        ({"free_memory": 1 << 20}, "/dev/shm", "fail", "1.0 MB free", "ranks_per_node"),
        ({"cpus": 0}, "cores", "warn", "1 x 1 cores wanted, 0 given", "SLURM_CPU_BIND"),
        ({"gpus": {}}, "GPUs", "fail", "2 GPUs promised, 0 there (none)", "gpus_per_node"),
        ({"gpus": {"CUDA_VISIBLE_DEVICES": "3"}}, "GPUs", "fail", "1 there (3)", "gpus_per_rank"),
        ({"gpu_names": ["NVIDIA A100"]}, "GPU type", "warn", "NVIDIA A100 by its driver", "partitions.NAME"),
        ({"interfaces": ["lo", "eth7"]}, "network", "fail", "no interface ib0; there are eth7", "ip -br"),
        ({"lock": "/x: Not supported"}, "file locks", "warn", "store does without", "HDF5_USE_FILE_LOCKING"),
        ({"lock": "/x: No", "hdf5_locking": "TRUE"}, "file locks", "fail", "asks for locks", "FALSE"),
        ({"see": "/m: No such file"}, "model", "fail", "/m", "ROLLART_CACHE"),
        ({"packages": {"torch": "2.12.0", "mpi4py": None}}, "packages", "fail",
         "torch 2.12.0, elsewhere 2.13.0; mpi4py missing, elsewhere 4.1.2", "python in the profile"),
        ({"python": "3.12.1"}, "packages", "fail", "python 3.12.1, elsewhere 3.11.7", "one environment"),
    ],
)  # fmt: skip
def test_a_node_that_is_not_well_is_named_with_what_and_the_mend(
    tmp_path: Path, facts: dict[str, Any], check: str, level: str, text: str, mend: str
) -> None:
    config = with_gpus(tmp_path)
    reports = [report("n1"), report("n2"), report("n3", **facts)]
    found = bad(short_checks(reports, config, CLUSTER))
    assert [(f.check, f.where, f.level) for f in found] == [(check, "n3", level)]
    assert text in found[0].text
    assert mend in found[0].mend


@pytest.mark.parametrize(
    ("wanted", "there", "said"),
    [
        ("nope0", ["eth0", "ib0", "lo"], "no interface nope0; there are eth0, ib0"),
        ("nope0", ["lo"], "no interface nope0; there are none"),
        ("ib0,ib1", ["ib1", "lo"], ""),
        ("ib0", [], ""),
        ("", ["eth0", "lo"], ""),
    ],
)
def test_an_interface_is_missed_where_the_node_has_none_of_its_names(
    wanted: str, there: list[str], said: str
) -> None:
    assert missing_interface(wanted, there) == said


def test_the_interface_of_a_partition_comes_before_the_profiles(tmp_path: Path) -> None:
    cpu = CLUSTER.partitions["cpu"].model_copy(update={"interface": "eth7"})
    cluster = CLUSTER.model_copy(update={"partitions": CLUSTER.partitions | {"cpu": cpu}})
    found = bad(short_checks([report("n1"), report("n2", "env", gpus={})], with_gpus(tmp_path), cluster))
    assert [(f.check, f.where, f.text) for f in found] == [
        ("network", "n2", "no interface eth7; there are ib0")
    ]


def test_nodes_with_the_same_problem_share_a_line(tmp_path: Path) -> None:
    reports = [report(f"n{number}", interfaces=["lo"]) for number in range(9)]
    found = bad(short_checks([*reports, report("m")], with_gpus(tmp_path), CLUSTER))
    assert [(f.check, f.where) for f in found] == [("network", "9 nodes")]
    found = bad(short_checks(reports[:2], with_gpus(tmp_path), CLUSTER))
    assert [f.where for f in found] == ["n0, n1"]


def test_a_node_that_does_not_answer_is_named_and_asked_nothing_else(tmp_path: Path) -> None:
    dead = NodeReport("n9", "env", False, "no answer within 20 s")
    found = bad(short_checks([report(), dead], with_gpus(tmp_path), CLUSTER))
    assert [(f.check, f.where, f.text) for f in found] == [("node answers", "n9", "no answer within 20 s")]


def test_a_clock_that_is_off_is_warned_of_before_it_is_refused(tmp_path: Path) -> None:
    reports = [
        replace(report("n1"), skew_s=2.5),
        replace(report("n2"), skew_s=-60.0, problem="its clock is 60 s"),
    ]
    found = bad(short_checks(reports, with_gpus(tmp_path), CLUSTER))
    assert [(f.where, f.level) for f in found] == [("n1", "warn"), ("n2", "fail")]
    assert "2.5 s ahead" in found[0].text and "60.0 s behind" in found[1].text


def test_hdf5_goes_without_locks_where_the_profile_says_so(tmp_path: Path) -> None:
    without = CLUSTER.model_copy(update={"environment": {"HDF5_USE_FILE_LOCKING": "FALSE"}})
    assert short_checks([report(lock="/x: Not supported")], with_gpus(tmp_path), without) == []


def test_the_type_of_a_gpu_is_compared_without_regard_to_spelling(tmp_path: Path) -> None:
    named = [report(gpu_names=["NVIDIA GH-200 480GB"])]
    renamed = CLUSTER.partitions["gpu"].model_copy(update={"gpu": "gh200"})
    gh200 = CLUSTER.model_copy(update={"partitions": CLUSTER.partitions | {"gpu": renamed}})
    assert short_checks(named, with_gpus(tmp_path), gh200) == []
    silent = nodes.node_findings([report(gpu_names=None)], with_gpus(tmp_path), CLUSTER)
    assert by_check(silent, "GPU type")[0].level == "skipped"


# --- a world, with measurements made up --------------------------------------------------------------


def world_of(config: RunConfig, **changes: Any) -> dict[str, Any]:
    """Return what the ranks of a world that is well would have written."""
    names = ["env", "env", "trainer", "generate"]
    cards = [
        {"rank": rank, "host": "n1", "component": name, "claimed": name, "cpus": 4,
         "threads": 2 if name == "generate" else 1, "wanted_gpus": 2 if name == "trainer" else 0,
         "gpus": ["0", "1"] if name == "trainer" else [], "devices": 2 if name == "trainer" else None,
         "versions": {"mpi4py": "4.1.2"}, "error": ""}
        for rank, name in enumerate(names)
    ]  # fmt: skip
    link = {"what": "env - trainer", "first": 1, "second": 2, "bulk": True, "rtt_us": 30.0, "best_us": 20.0}
    links = [link | {"mb_s": 5000.0}]
    return {"expected": 4, "size": 4, "cards": cards, "links": links, "nccl": {"ranks": 1, "mb_s": 90000.0}}


def test_a_world_that_is_well_is_told_with_its_measurements(tmp_path: Path) -> None:
    config = with_gpus(tmp_path)
    found = judge(config, world_of(config), 3.2)
    assert bad(found) == []
    texts = {finding.check: finding.text for finding in found}
    assert texts["env - trainer"] == "round trip 30 us, 5,000 MB/s"
    assert texts["NCCL"] == "broadcast of 16 MB at 90,000 MB/s"
    assert [f.text for f in by_check(found, "ranks")][:1] == ["0-1; ranks by host: n1 2"]


@pytest.mark.parametrize(
    ("rank", "card", "check", "text"),
    [
        (2, {"error": "needs 2 GPUs"}, "GPUs of ranks", "needs 2 GPUs"),
        (3, {"gpus": ["0"]}, "GPUs of ranks", "sees 0, wanted 0"),
        (2, {"devices": 0}, "GPUs of ranks", "given 0, 1, but its GPU library sees 0"),
        (3, {"threads": 64}, "threads", "OMP_NUM_THREADS is 64, cpus_per_rank 2"),
        (3, {"cpus": 1}, "threads", "may use 1 cores on n1, cpus_per_rank is 2"),
        (1, {"claimed": "trainer"}, "ranks", "rank 1 was started as one of trainer"),
        (1, {"host": "n2"}, "ranks", "2 ranks a node wanted, n1 has 1"),
        (1, {"versions": {"mpi4py": "3.1"}}, "ranks' packages", "mpi4py 3.1, rank 0 has 4.1.2"),
    ],
)
def test_a_rank_that_is_not_as_asked_is_named(
    tmp_path: Path, rank: int, card: dict[str, Any], check: str, text: str
) -> None:
    config = with_gpus(tmp_path)
    written = world_of(config)
    written["cards"][rank] |= card
    found = bad(judge(config, written, 1.0))
    assert [f.check for f in found] == [check]
    assert text in found[0].text


def test_slow_ways_and_a_failing_nccl_are_warned_of(tmp_path: Path) -> None:
    config = with_gpus(tmp_path)
    written = world_of(config)
    written["links"][0]["mb_s"] = 9.0
    written["nccl"] = {"ranks": 2, "error": "unhandled system error"}
    assert [f.check for f in bad(judge(config, written, 1.0))] == ["env - trainer", "NCCL"]


# --- this machine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "check", "where", "mend"),
    [
        ("launch.max_ranks=2", "configuration", "launch.max_ranks", "use fewer ranks"),
        (
            "components.generate.ranks_per_node=9000",
            "configuration",
            "launch.max_ranks",
            "raise launch.max_ranks",
        ),
        ("tasks.lake.env=frozen-lakes", "configuration", "tasks.0", ""),
        ("components.env.nodes=2", "configuration", "components.env.nodes", "nodes: 1"),
        ("run.dir=/proc/1/run", "run directory", "/proc/1", "--dir"),
    ],
)
def test_what_keeps_a_run_from_starting_here_is_found_before_ranks_start(
    conf: Path, override: str, check: str, where: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "try_world", lambda *_: pytest.fail("ranks were started"))
    found = examine.examine_here(read(conf, override))
    mine = [f for f in found if f.level == "fail" and f.check == check and f.where == where]
    assert mine and mend in f"{mine[0].text} {mine[0].mend}", found
    assert by_check(found, "MPI world")[0].level == "skipped"
    assert results.exit_code(found) == 2


def test_a_missing_model_is_told_beside_all_else(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = Finding("MPI world", "1 host", "ok", "4 ranks")
    monkeypatch.setattr(examine, "try_world", lambda *_: [world])
    found = examine.examine_here(read(conf, "model={path: /nowhere/at/all}"))
    assert [(f.check, f.where) for f in bad(found)] == [("model", "/nowhere/at/all")]
    assert bad(found)[0].level == "fail" and "model.path" in bad(found)[0].mend
    assert found[-1] == world


def make_model(folder: Path) -> Path:
    """Make the smallest folder that passes for a model."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4000000]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_a_whole_model_folder_is_fine_and_its_size_is_known(conf: Path, tmp_path: Path) -> None:
    config = read(conf, f"model={{path: {make_model(tmp_path / 'm')}}}")
    assert [f.level for f in here.model(config)] == ["ok"]
    assert here.parameters(config) == 1_000_000


@pytest.mark.parametrize(
    ("without", "check", "text"),
    [
        ("config.json", "model", "there is no config.json"),
        ("tokenizer_config.json", "tokenizer", "there is no tokenizer_config.json"),
        ("tokenizer.json", "tokenizer", "none of tokenizer.json"),
        ("model.safetensors", "model", "there is no *.safetensors"),
    ],
)
def test_what_a_model_folder_lacks_is_named(tmp_path: Path, without: str, check: str, text: str) -> None:
    folder = make_model(tmp_path / "m")
    (folder / without).unlink()
    found = bad(list(here.folder_problems(folder)))
    assert [(f.check, f.level) for f in found] == [(check, "fail")]
    assert text in found[0].text


def test_a_missing_shard_and_a_missing_chat_template_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    (folder / "tokenizer_config.json").write_text("{}")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    texts = [f.text for f in bad(list(here.folder_problems(folder)))]
    assert texts == ["there is no model-2.safetensors", "it has no chat template"]
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert len(list(here.folder_problems(folder))) == 1


@pytest.mark.parametrize(("free", "level"), [(50 << 20, "fail"), (300 << 20, "warn"), (100 * GIB, "ok")])
def test_free_space_is_compared_with_the_checkpoints(conf: Path, free: int, level: str) -> None:
    config = read(conf, "run.steps=100").model_copy(update={"checkpoint": Checkpoint(every_steps=1)})
    found = list(here.space(config, Path("/x"), free))
    assert [f.level for f in found] == [level]
    assert level == "ok" or "checkpoint.keep" in found[0].mend


@pytest.mark.parametrize(
    ("checkpoint", "number"),
    [
        (Checkpoint(every_steps=1), 3),
        (Checkpoint(every_steps=1, keep=9), 10),
        (Checkpoint(every_steps=60, keep=9), 2),
        (Checkpoint(every_steps=None), 1),
    ],
)
def test_checkpoints_that_are_kept_and_the_one_being_written_count(
    conf: Path, checkpoint: Checkpoint, number: int
) -> None:
    config = read(conf, "run.steps=100").model_copy(update={"checkpoint": checkpoint})
    (found,) = here.space(config, Path("/x"), 100 * GIB)
    assert f"; {number} checkpoint" in found.text


def test_space_below_five_gigabytes_is_warned_of_when_the_model_is_not_there(conf: Path) -> None:
    config = read(conf, "model={path: /nowhere}")
    assert [f.level for f in here.space(config, Path("/x"), 4 * GIB)] == ["warn"]
    assert [f.level for f in here.space(config, Path("/x"), 6 * GIB)] == ["ok"]


def test_a_scratch_path_that_is_too_long_for_sockets_is_refused() -> None:
    assert list(here.socket_path(Path("/tmp"))) == []
    long = Path("/" + "x" * 60)
    found = bad(list(here.socket_path(long)))
    assert found[0].level == "fail" and "107" in found[0].text
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="too long"):
        sock.bind(str(long / ("y" * 50)))


# --- real worlds -------------------------------------------------------------------------------------


@pytest.mark.timeout(180)
def test_all_is_fine_here_and_nothing_is_left(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(conf.parent.iterdir())
    with pytest.raises(SystemExit) as end:
        app(["doctor", str(conf), "--json"], prog_name="hpc-rollart")
    said = json.loads(capsys.readouterr().out)
    failed = [f for f in said["findings"] if f["level"] == "fail"]
    assert end.value.code == 0, failed
    checks = {f["check"] for f in said["findings"]}
    assert {"packages", "mpirun", "model", "MPI world", "ranks", "threads", "env - generator"} <= checks
    assert {"env - trainer", "trainer - generator", "coordinator - all"} <= checks
    assert set(conf.parent.iterdir()) == before


class Singletons(LocalLauncher):
    """Starts the ranks as an mpirun of another MPI does: each sees itself only."""

    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        line = 'for i in 1 2 3 4; do "$@" & done; wait'
        return ["sh", "-c", line, "sh", *rank_command]


@pytest.mark.timeout(180)
def test_ranks_that_start_as_singletons_are_named_so(conf: Path) -> None:
    with examine.temporary_run(read(conf)) as (config, run):
        found = bad(try_world(config, run, Singletons()))
    assert [(f.check, f.level) for f in found] == [("MPI world", "fail")]
    assert found[0].text.startswith("singletons: 4 processes each started as a world of one")
    assert "mpirun beside python" in found[0].mend


class Stuck(LocalLauncher):
    """Starts one process that never says a word."""

    def command(self, config: RunConfig, rank_command: list[str]) -> list[str]:
        return ["sleep", "300"]


def test_ranks_that_never_start_are_counted(conf: Path) -> None:
    with examine.temporary_run(read(conf)) as (config, run):
        found = bad(try_world(config, run, Stuck(), deadline_s=1.0))
    assert "not done after 1 s: 4 had not started" in found[0].text
    assert "launch.start_deadline_s" in found[0].mend


def test_a_world_that_hangs_is_told_by_how_far_its_ranks_came(conf: Path) -> None:
    with examine.temporary_run(read(conf)) as (config, run):
        note = probe.Note(run.path)
        note.write("gathering")
        text = world._hung(config, run.path, 9.0).text
    host = os.uname().nodename
    assert f"1 at 'gathering' (such as rank-None on {host})" in text
    assert "3 had not started" in text


# --- a login node ------------------------------------------------------------------------------------

UP = "PartitionName=c State=UP TotalNodes=9 MaxNodes=UNLIMITED MaxTime=UNLIMITED\n"


def idle(**answers: Any) -> FakeSlurm:
    """Return a cluster whose partitions are up and empty."""
    return FakeSlurm(**{"scontrol": UP, "sinfo": "9|idle\n"} | answers)


def login(conf: Path, slurm: FakeSlurm, *overrides: str, **cluster: Any) -> list[Finding]:
    """Return what the doctor says on a login node of a made-up cluster."""
    config = read(conf, *overrides)
    profile = CLUSTER.model_copy(update={"tested": True, **cluster})
    return by_job.from_login(config, profile, shared=True, runner=slurm)


def test_a_login_node_tells_what_is_fine_without_a_job(conf: Path) -> None:
    slurm = FakeSlurm(scontrol=UP, sinfo="3|idle\n2|down*\n")
    found = login(conf, slurm)
    assert bad(found) == []
    assert by_check(found, "partition")[0].text == "3 nodes up, 3 idle, 2 needed"


@pytest.mark.parametrize(
    ("slurm", "overrides", "cluster", "check", "text"),
    [
        (FakeSlurm(scontrol=UP, sinfo="1|down*\n1|drained\n"), [], {}, "partition", "0 nodes up"),
        (FakeSlurm(scontrol=UP.replace("UP", "DOWN"), sinfo="9|idle\n"), [], {}, "partitions", "is DOWN"),
        (FakeSlurm(sinfo=refused("sinfo", "Unable to contact slurm controller")), [], {}, "Slurm", "Unable"),
        (idle(), [], {"tested": False}, "profile", "nobody has run it"),
        (idle(), [], {"account_needed": True}, "placement", "without an account"),
        (idle(), ["components.generate.gpus_per_rank=9"], {}, "placement", "9 GPUs"),
    ],
)  # fmt: skip
def test_a_login_node_tells_what_is_not(
    conf: Path, slurm: FakeSlurm, overrides: list[str], cluster: dict[str, Any], check: str, text: str
) -> None:
    found = bad(login(conf, slurm, *overrides, **cluster))
    assert found and found[0].check == check and text in found[0].text, found


def test_nothing_is_submitted_when_the_login_node_already_knows_better(conf: Path) -> None:
    slurm = idle()
    config = read(conf, "components.generate.gpus_per_rank=9")
    found = by_job.examine_cluster(
        config, CLUSTER, by_job.Wait(1.0, lambda _: None), shared=True, runner=slurm
    )
    assert by_check(found, "job")[0].level == "skipped"
    assert "sbatch" not in slurm.names()


def test_a_job_that_stays_pending_is_cancelled_and_its_reason_told(conf: Path) -> None:
    state = ["PENDING"]

    def cancel(command: Any) -> str:
        state[0] = "CANCELLED"
        return ""

    slurm = FakeSlurm(
        scontrol=UP,
        sinfo="9|idle\n",
        squeue=lambda _: f"4711+0|{state[0]}|g|1|0:00|N/A||Priority\n",
        scancel=cancel,
    )
    before = set(conf.parent.iterdir())
    said: list[str] = []
    found = by_job.examine_cluster(
        read(conf), CLUSTER, by_job.Wait(0.5, said.append), shared=True, runner=slurm
    )
    job = by_check(found, "job")[0]
    assert job.level == "fail" and "still pending after 0.5 s (Priority: other jobs come first)" in job.text
    assert "--wait" in job.mend
    assert ["scancel", "4711"] in slurm.asked
    assert set(conf.parent.iterdir()) == before
    assert "job 4711 is waiting (Priority: other jobs come first)" in said


def test_a_job_that_dies_before_it_says_anything_leaves_its_folder(
    conf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_job, "_SHOWS_WITHIN_S", 1.0)
    slurm = FakeSlurm(scontrol=UP, sinfo="9|idle\n", squeue="4711+0|FAILED|g|1|0:00|N/A||None\n")

    def submit(command: Any) -> str:
        folder = Path(command[-1]).parent
        (folder / "4711_0_log.out").write_text("ModuleNotFoundError: No module named 'hpc_rollart'\n")
        return "Submitted batch job 4711\n"

    slurm.answers["sbatch"] = submit
    found = by_job.examine_cluster(
        read(conf), CLUSTER, by_job.Wait(9.0, lambda _: None), shared=True, runner=slurm
    )
    job = by_check(found, "job")[0]
    assert "ended FAILED" in job.text and "No module named 'hpc_rollart'" in job.text
    kept = by_check(found, results.KEPT)[0]
    assert Path(kept.where).is_dir()


def test_ctrl_c_while_the_job_is_submitted_cancels_it(conf: Path) -> None:
    slurm = idle()

    def submit(command: Any) -> str:
        slurm.answers["squeue"] = lambda asked: f"4711+0|{command[-1]}\n" if "--me" in asked else ""
        raise KeyboardInterrupt

    slurm.answers["sbatch"] = submit
    before = set(conf.parent.iterdir())
    with pytest.raises(KeyboardInterrupt):
        by_job.examine_cluster(
            read(conf), CLUSTER, by_job.Wait(9.0, lambda _: None), shared=True, runner=slurm
        )
    assert ["scancel", "4711"] in slurm.asked
    assert set(conf.parent.iterdir()) == before


def test_the_doctors_job_need_not_last_as_long_as_a_run_takes_to_stop(conf: Path, tmp_path: Path) -> None:
    config = read(conf, "launch.stop_lead_s=10m")
    text = by_job.executor(config, by_job.short(CLUSTER), tmp_path, FakeSlurm()).script()
    assert "#SBATCH --job-name=doctor-small" in text and f"#SBATCH --chdir={tmp_path}" in text
    odd = by_job.executor(config, by_job.short(CLUSTER), tmp_path / "50%", FakeSlurm()).script()
    assert "--chdir" not in odd


def test_the_job_is_short_and_is_not_requeued(conf: Path, tmp_path: Path) -> None:
    config = read(conf)
    text = by_job.executor(config, by_job.short(CLUSTER), tmp_path, FakeSlurm()).script()
    assert text.count("#SBATCH --time=00:05:00") == 3
    assert text.count("#SBATCH --no-requeue") == 3
    assert "--signal" not in text
    assert len(place(config, CLUSTER)) == 3


# --- what people and programs get --------------------------------------------------------------------


def shown(findings: list[Finding]) -> str:
    """Return the table as it is when it is piped."""
    out = io.StringIO()
    results.show(findings, "this machine", Console(file=out, width=80), 3.0)
    return out.getvalue()


def test_the_table_is_plain_and_within_80_columns(tmp_path: Path) -> None:
    text = shown(
        [
            Finding("MPI world", "4 nodes", "ok", "5 ranks as expected"),
            Finding("scratch", "n1", "fail", "[/tmp] is full " * 9, "make room " * 9),
            Finding("NCCL", "2 GPU ranks", "skipped", "no GPU"),
        ]
    )
    assert text.isascii() and all(len(line) <= 80 for line in text.splitlines())
    assert "FAIL" in text and "[/tmp]" in text and "->" in text
    assert "The run would fail on this machine" in text
    assert "1 fine, 1 failed, 1 not checked; 3 s." in " ".join(text.split())


def test_findings_survive_their_file(tmp_path: Path) -> None:
    findings = [Finding("a", "b", "warn", "c", "d"), Finding("e", "f", "ok", "g")]
    results.write(tmp_path / "f.json", findings)
    assert results.read(tmp_path / "f.json") == findings
    assert json.loads(results.as_json(findings, "here", 1.0))["verdict"] == "warn"


def test_an_errors_mend_is_taken_from_its_line() -> None:
    assert from_line("c", "w", "too many; use fewer") == Finding("c", "w", "fail", "too many", "use fewer")
    assert from_line("c", "w", "no mpirun: install it").mend == "install it"


def test_a_config_that_cannot_be_read_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        examine.load_unchecked(tmp_path / "none.yaml", [])
