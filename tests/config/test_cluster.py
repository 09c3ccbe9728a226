"""Cluster profiles: the shipped ones, where a name is looked up, where a component goes, and every mistake."""

# ruff: noqa: E501 (an expected message stays on one line, as the user sees it)

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_rollart.config import ConfigError
from hpc_rollart.config.cluster import (
    Cluster,
    Container,
    Partition,
    Signal,
    cluster_names,
    find_cluster,
    load_cluster,
    partition_of,
)
from hpc_rollart.config.schema import EnvComponent, GeneratorComponent, TrainerComponent
from hpc_rollart.launch.agent import GPU_VARIABLES, NODES_VARIABLE
from hpc_rollart.launch.gpus import GPU_VENDOR
from hpc_rollart.launch.mpirun import COMPONENT, THREAD_VARIABLES, scratch_variables
from hpc_rollart.launch.processes import MARKER

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "conf" / "cluster").glob("*.yaml"))
SITES = [path for path in SHIPPED if path.stem not in ("generic", "testbed")]

GOOD = textwrap.dedent(
    """\
    description: a cluster
    partitions:
      gpu: {partition: gpu, gpu: a100, gres: "gpu:{count}", gpus_per_node: 4}
      cpu: {partition: cpu, cpus_per_node: 64}
      low: {partition: low, gpu: a100, gres: "gpu:{count}", gpus_per_node: 4, qos: low}
    roles:
      trainer: gpu
      env: cpu
    """
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(GOOD)
    return path


def replaced(file: Path, old: str, new: str) -> Path:
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    return file


def lines(file: Path, *overrides: str) -> list[str]:
    """Return the problems of `file` without its directory."""
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(file), overrides)
    return [line.replace(f"{file.parent}/", "") for line in caught.value.lines]


# --- shipped profiles --------------------------------------------------------------------------------


def test_shipped_profiles_are_there() -> None:
    assert [path.stem for path in SHIPPED] == [
        "generic",
        "isambard-ai",
        "juwels-booster",
        "leonardo",
        "lumi",
        "marenostrum5",
        "perlmutter",
        "testbed",
    ]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profile_is_right_and_places_every_role(path: Path) -> None:
    cluster = load_cluster(str(path))
    assert set(cluster.roles) == {"trainer", "generator", "env"}
    assert cluster.partitions[cluster.roles["trainer"]].gpu is not None
    assert cluster.tested == (path.stem == "testbed")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_components_of_a_shipped_profile_hand_no_option_on_to_the_next(path: Path) -> None:
    cluster = load_cluster(str(path), ["account=m1234"])
    used = [cluster.partitions[name] for name in cluster.roles.values()]
    for key in ("account", "qos", "constraint", "memory", "options"):
        named = {bool(getattr(part, key) or getattr(cluster, key, None)) for part in used}
        assert len(named) == 1, key


@pytest.mark.parametrize("path", SITES, ids=lambda path: path.stem)
def test_profile_of_a_site_says_that_it_is_untested_and_where_its_facts_are_from(path: Path) -> None:
    text = path.read_text()
    top = text.partition("description:")[0]
    assert "# Untested: written from public documentation, read on 2026-12-01" in top
    assert "# Fill in: " in top
    assert len(set(re.findall(r"https://[^\s,;]+", text))) >= 2
    assert not load_cluster(str(path)).tested


def test_template_mentions_every_key() -> None:
    text = (ROOT / "conf" / "cluster" / "generic.yaml").read_text()
    for model in (Cluster, Partition, Container, Signal):
        for key in model.model_fields:
            assert re.search(rf"\b{key}:", text), f"{model.__name__}.{key}"


def test_what_the_template_leaves_out_behind_a_hash_is_right_too() -> None:
    text = (ROOT / "conf" / "cluster" / "generic.yaml").read_text()
    whole = re.sub(r"^( *)# (?=[a-z_]+: )", r"\1", text, flags=re.MULTILINE)
    cluster = Cluster.model_validate(yaml.safe_load(whole))
    assert cluster.container is not None
    assert cluster.partitions["gpu"].account == "{account}-gpu"


def test_gpus_of_the_testbed_are_those_of_their_own_partition_first() -> None:
    cluster = load_cluster("testbed")
    for gpu in ("h100", "h20"):
        assert partition_of(cluster, GeneratorComponent(role="generator", gpu=gpu)) == gpu
        assert cluster.partitions[f"low-{gpu}"].gpu == gpu
        assert cluster.partitions[f"low-{gpu}"].partition == "low"


# --- where a name is looked up -----------------------------------------------------------------------


def test_name_is_looked_up_here_then_in_the_users_folder_then_among_the_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here" / "conf" / "cluster"
    home = tmp_path / "config" / "hpc_rollart" / "cluster"
    for folder in (here, home):
        folder.mkdir(parents=True)
        (folder / "lumi.yaml").write_text(GOOD)
    (home / "mine.yaml").write_text(GOOD)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert find_cluster("lumi") == here / "lumi.yaml"
    (here / "lumi.yaml").unlink()
    assert find_cluster("lumi") == home / "lumi.yaml"
    (home / "lumi.yaml").unlink()
    assert find_cluster("lumi") == ROOT / "conf" / "cluster" / "lumi.yaml"
    assert {"lumi", "mine", "testbed"} <= set(cluster_names())


def test_users_folder_is_below_home_without_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".config" / "hpc_rollart" / "cluster"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(GOOD)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cluster("mine") == folder / "mine.yaml"


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster("lummi")
    (line,) = caught.value.lines
    assert line.startswith("cluster: there is no profile 'lummi'; profiles: generic, isambard-ai, ")
    assert line.endswith("; or give a file")


def test_what_looks_like_a_file_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(GOOD)
    assert load_cluster("site.yaml") == load_cluster("./site.yaml")
    with pytest.raises(ConfigError, match=r"^none\.yaml: there is no such file$"):
        load_cluster("none.yaml")


# --- where a component goes --------------------------------------------------------------------------


def test_partition_then_gpu_type_then_role_decide(file: Path) -> None:
    cluster = load_cluster(str(file))
    assert partition_of(cluster, GeneratorComponent(role="generator", partition="low", gpu="a100")) == "low"
    assert partition_of(cluster, GeneratorComponent(role="generator", gpu="a100")) == "gpu"
    assert partition_of(cluster, TrainerComponent(role="trainer")) == "gpu"
    assert partition_of(cluster, EnvComponent(role="env")) == "cpu"


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (
            EnvComponent(role="env", partition="cpus"),
            "there is no partition 'cpus'; partitions: gpu, cpu, low",
        ),
        (TrainerComponent(role="trainer", gpu="h100"), "no partition has GPU type 'h100'; types: a100"),
        (
            GeneratorComponent(role="generator"),
            "the profile's roles name no partition for generator; set `partition`",
        ),
    ],
)
def test_component_without_a_place_is_told_what_there_is(file: Path, component: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        partition_of(load_cluster(str(file)), component)


# --- mistakes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "description:",
            "descripton: x\ndescription:",
            "site.yaml:1: descripton: unknown key; did you mean description?",
        ),
        (
            "cpus_per_node: 64",
            "threads: 64",
            "site.yaml:4: partitions.cpu.threads: unknown key; keys here: partition, gpu, gres, gpus_per_node, "
            "cpus_per_node, whole_nodes, account, qos, constraint, memory, max_nodes, max_time, options, interface",
        ),
        (
            "env: cpu",
            "env: cpus",
            "site.yaml:8: roles.env: there is no partition 'cpus'; partitions: gpu, cpu, low",
        ),
        (
            "  env: cpu",
            "  environment: cpu",
            "site.yaml:8: roles.environment: must be 'trainer', 'generator' or 'env', not 'environment'",
        ),
        (
            'gpu: a100, gres: "gpu:{count}", gpus_per_node: 4}\n  cpu',
            'gpu: a100, gres: "gpu:{count}"}\n  cpu',
            "site.yaml:3: partitions.gpu: give gpu and gpus_per_node both, or neither",
        ),
        (
            "cpus_per_node: 64",
            "gpus_per_node: 4",
            "site.yaml:4: partitions.cpu: give gpu and gpus_per_node both, or neither",
        ),
        (
            "cpus_per_node: 64",
            'gres: "gpu:{count}"',
            "site.yaml:4: partitions.cpu.gres: give gpu and gpus_per_node too, or remove it",
        ),
        (
            'gres: "gpu:{count}", gpus_per_node: 4}\n  cpu',
            'gres: "gpu:4", gpus_per_node: 4}\n  cpu',
            'site.yaml:3: partitions.gpu.gres: expected {count} where the number of GPUs goes, such as gpu:{count}, not "gpu:4"',
        ),
        (
            "qos: low",
            "qos: low; rm -r .",
            "site.yaml:5: partitions.low.qos: expected one word without blanks, quotes and what a shell would read: "
            'leave out ; blanks, not "low; rm -r ."',
        ),
        (
            "qos: low",
            "account: $(id)",
            "site.yaml:5: partitions.low.account: expected one word without blanks, quotes and what a shell would read: "
            'leave out $ ( ), not "$(id)"',
        ),
        (
            "qos: low",
            "constraint: a`id`",
            "site.yaml:5: partitions.low.constraint: expected one word without blanks, quotes and what a shell would read: "
            'leave out `, not "a`id`"',
        ),
        (
            "qos: low",
            'options: {comment: "a b"}',
            "site.yaml:5: partitions.low.options.comment: expected one word without blanks, quotes and what a shell would read: "
            'leave out blanks, not "a b"',
        ),
        (
            "qos: low",
            "options: {comment: [a]}",
            'site.yaml:5: partitions.low.options.comment: expected one word, a whole number, true or false, not ["a"]',
        ),
        (
            "qos: low",
            "options: {partition: gpu}",
            "site.yaml:5: partitions.low.options.partition: --partition is not set here: use the key partition",
        ),
        (
            "roles:",
            "options: {nodes: 2}\nroles:",
            "site.yaml:6: options.nodes: --nodes is not set here: it follows from the run's components and name; remove it",
        ),
        (
            "roles:",
            "modules: [gcc, cuda && reboot]\nroles:",
            "site.yaml:6: modules.1: expected one word without blanks, quotes and what a shell would read: "
            'leave out blanks &, not "cuda && reboot"',
        ),
        (
            "roles:",
            "environment: {A-B: x}\nroles:",
            'site.yaml:6: environment.A-B: expected a variable\'s name of letters, digits and _, no digit first, not "A-B"',
        ),
        (
            "roles:",
            "launcher: mpiexec\nroles:",
            "site.yaml:6: launcher: must be 'mpirun' or 'srun', not 'mpiexec'",
        ),
        (
            "roles:",
            "time: forever\nroles:",
            'site.yaml:6: time: expected a duration such as 90s, 30m, 12h or 1h30m, not "forever"',
        ),
        (
            "roles:",
            "container: {}\nroles:",
            "site.yaml:6: container.image: required key is missing",
        ),
        (
            "roles:",
            "gpu_vendor: amd\ncontainer: {image: a.sif}\nroles:",
            "site.yaml:7: container.gpu: nv does not fit gpu_vendor amd; give rocm or none",
        ),
        (
            "roles:",
            "container: {image: a.sif, gpu: rocm}\nroles:",
            "site.yaml:6: container.gpu: rocm does not fit gpu_vendor nvidia; give nv or none",
        ),
    ],
)
def test_mistake_is_one_line_with_file_line_key_and_mend(file: Path, old: str, new: str, line: str) -> None:
    assert lines(replaced(file, old, new)) == [line]


def test_file_of_another_kind_is_told_what_a_profile_has(file: Path) -> None:
    file.write_text("- a list\n")
    assert lines(file) == ["site.yaml: expected keys such as description, partitions and roles at the top"]


@pytest.mark.parametrize(
    "more",
    [
        "container: {image: a.sif}\nmodules: [apptainer/1.3]",
        "container: {image: a.sif, gpu: none}\ngpu_vendor: amd",
        "launcher: srun\npmix: pmix_v4",
        "options: {exclusive: true, mail-type: END, nice: 100}",
        "setup: ['ulimit -s unlimited; export A=\"$HOME\"']",
        "signal: {name: TERM, request: false}",
    ],
)
def test_what_goes_together_is_taken(file: Path, more: str) -> None:
    load_cluster(str(replaced(file, "roles:", f"{more}\nroles:")))


@pytest.mark.parametrize("constraint", ["gpu", "gpu&hbm80g", "[rack1|rack2]", "(a&b)|!c", "gpu*2&nvme"])
def test_features_of_a_constraint_may_be_joined(file: Path, constraint: str) -> None:
    cluster = load_cluster(str(file), [f"partitions.gpu.constraint='{constraint}'"])
    assert cluster.partitions["gpu"].constraint == constraint


@pytest.mark.parametrize("scratch", ["/tmp", "/local/my jobs", "$TMPDIR", "$TMPDIR/x/y"])
def test_scratch_is_an_absolute_path_or_begins_with_a_variable(file: Path, scratch: str) -> None:
    assert load_cluster(str(file), [f"scratch={scratch}"]).scratch == scratch


@pytest.mark.parametrize(
    "scratch", ["tmp", "", "~/tmp", "${TMPDIR}", "${TMPDIR}/x", "$", "$1/x", "$TMP-x", "x$TMP"]
)
def test_scratch_of_another_form_is_refused_with_the_mend(file: Path, scratch: str) -> None:
    (line,) = lines(file, f"scratch='{scratch}'")
    assert "expected an absolute path such as /tmp, or a variable without braces: $TMPDIR/x, not " in line


# --- overrides ---------------------------------------------------------------------------------------


def test_override_changes_one_key(file: Path) -> None:
    changed = load_cluster(str(file), ["time=2h", "partitions.cpu.max_nodes=3", "interface=ib0"])
    assert (changed.time, changed.partitions["cpu"].max_nodes, changed.interface) == (7200, 3, "ib0")
    assert changed.partitions["cpu"].cpus_per_node == 64


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("time", "-c time: expected KEY=VALUE, for example time=2h"),
        (
            "roles.env=none",
            "-c roles.env=none: roles.env: there is no partition 'none'; partitions: gpu, cpu, low",
        ),
        (
            "qos=a b",
            "-c qos=a b: qos: expected one word without blanks, quotes and what a shell would read: "
            'leave out blanks, not "a b"',
        ),
        ("qoss=a", "-c qoss=a: qoss: unknown key; did you mean qos?"),
        (
            "partitions.gpu.gpus_per_node=0",
            "site.yaml:3: partitions.gpu: give gpu and gpus_per_node both, or neither "
            "(with -c partitions.gpu.gpus_per_node=0)",
        ),
    ],
)
def test_mistake_in_an_override_names_it(file: Path, override: str, line: str) -> None:
    assert lines(file, override) == [line]


# --- what would break a job --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "mend"),
    [
        (
            "wrap",
            "--wrap is not set here: this program writes the script; use the key setup for lines of shell",
        ),
        ("hetjob", "--hetjob is not set here: it follows from the run's components and name; remove it"),
        (
            "wait",
            "--wait is not set here: sbatch would not come back before the run's end; use hpc-rollart status --watch",
        ),
        (
            "test-only",
            "--test-only is not set here: nothing would be submitted; use hpc-rollart submit --dry-run",
        ),
        (
            "parsable",
            "--parsable is not set here: it changes what sbatch says, which this program reads; remove it",
        ),
        (
            "export",
            "--export is not set here: the job has the shell's environment; use the keys environment and setup",
        ),
        (
            "clusters",
            "--clusters is not set here: Slurm's other commands must find the job too; set SLURM_CLUSTERS in your shell",
        ),
        (
            "gpus",
            "--gpus is not set here: use the keys gpu and gres, and gpus_per_rank of the run's components",
        ),
        ("cpus-per-gpu", "--cpus-per-gpu is not set here: use cpus_per_rank of the run's components"),
        ("mem-per-cpu", "--mem-per-cpu is not set here: use the key memory"),
        ("N", "-N is one letter: give the long name that sbatch --help shows beside it"),
        ("part", "--partition is not set here: use the key partition"),
    ],
)
def test_option_that_breaks_a_submission_is_refused_with_the_mend(file: Path, option: str, mend: str) -> None:
    where = f"options.{option}"
    assert lines(file, f"{where}=1") == [f"-c {where}=1: {where}: {mend}"]


@pytest.mark.parametrize(
    "option",
    ["begin", "dependency", "nodelist", "exclude", "exclusive", "mail-user", "comment", "hint", "time-min", "bb",
     "ignore-pbs", "licenses", "switches", "gres-flags", "mem-bind", "wait-all-nodes", "nice", "tmp"],
)  # fmt: skip
def test_option_that_a_user_may_want_is_taken(file: Path, option: str) -> None:
    assert load_cluster(str(file), [f"options.{option}=1"]).options == {option: 1}


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        (
            "PATH",
            "Slurm's commands would have it too, in place of the node's; use modules, or an export in setup",
        ),
        (
            "LD_PRELOAD",
            "Slurm's commands would have it too, in place of the node's; use modules, or an export in setup",
        ),
        ("SLURM_JOB_ID", "Slurm sets it, or its commands obey it; use options, or remove it"),
        ("SQUEUE_FORMAT", "Slurm sets it, or its commands obey it; use options, or remove it"),
        ("PMIX_RANK", "MPI sets it for each rank; only its OMPI_MCA_, PRTE_MCA_ and PMIX_MCA_ may be tuned"),
        ("PRTE_MCA_plm_ssh_agent", "it is set for each attempt; remove it"),
        ("PYTHONHOME", "Python would not start; use the key python"),
    ],
)
def test_variable_that_breaks_a_run_is_refused_with_the_mend(file: Path, name: str, mend: str) -> None:
    where = f"environment.{name}"
    assert lines(file, f"{where}=x") == [f"-c {where}=x: {where}: {name} is not set here: {mend}"]


@pytest.mark.parametrize(
    "name",
    [*GPU_VARIABLES, *THREAD_VARIABLES, *scratch_variables(Path("/s"), Path("/m")), MARKER, COMPONENT, GPU_VENDOR,
     NODES_VARIABLE],
)  # fmt: skip
def test_variable_that_the_launchers_set_is_refused(file: Path, name: str) -> None:
    (line,) = lines(file, f"environment.{name}=x")
    assert f"{name} is not set here: " in line


@pytest.mark.parametrize(
    "name",
    ["OMPI_MCA_btl_tcp_links", "PMIX_MCA_gds", "UCX_TLS", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "FI_PROVIDER",
     "HF_HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "ROLLART_CACHE", "HDF5_USE_FILE_LOCKING"],
)  # fmt: skip
def test_variable_that_tunes_a_run_is_taken(file: Path, name: str) -> None:
    assert load_cluster(str(file), [f"environment.{name}=x"]).environment == {name: "x"}


@pytest.mark.parametrize(
    "override",
    ["account=LONG", "account='LONG LONG'", "launcher=LONG", "roles.env=LONG", "options.LONG=1", "LONG=1",
     "environment.x-LONG=1", "environment.SLURM_LONG=1", "partitions.LONG.gpu=x", "scratch=LONG", "time=LONG"],
)  # fmt: skip
def test_value_of_a_screen_is_cut_where_it_is_quoted(file: Path, override: str) -> None:
    for line in lines(file, override.replace("LONG", "x" * 100_000)):
        assert len(line) < 600, line[:600]


def test_profile_whose_name_is_too_long_for_a_file_is_unknown() -> None:
    with pytest.raises(
        ConfigError, match=r"there is no profile 'x{60}\.\.\. \(100,000 characters\)'; profiles: "
    ):
        load_cluster("x" * 100_000)


def test_characters_of_a_word_are_shown_even_if_they_are_no_text(file: Path) -> None:
    (line,) = lines(file, 'qos="a\\x07b"')
    assert r"leave out \x07" in line and line.isprintable()
