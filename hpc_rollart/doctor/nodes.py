"""What the nodes of a job said of themselves, judged: each function looks at one thing on all nodes."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hpc_rollart.config.cluster import Cluster, interface_of, partition_of
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor.results import Finding
from hpc_rollart.launch.nodecheck import missing_interface
from hpc_rollart.launch.nodes import NodeReport, visible_gpus

Check = Callable[[Sequence[NodeReport], RunConfig, Cluster], Iterator[Finding]]

# The clocks' difference above which timelines no longer match; `nodes.check_nodes` refuses at more.
_WARN_SKEW_S = 1.0
GIB = 1 << 30
# Sockets, caches of compilers, logs of MPI's daemons.
MIN_SCRATCH = 1 * GIB
# A rank's segment is 16 MiB in Open MPI's default; the other half is for what a role shares with its workers.
SHM_A_RANK = 32 << 20
MIN_RUN_DIR = 5 * GIB
# Values with which HDF5 does not lock, or goes on where it cannot.
_NO_LOCKS = ("FALSE", "0", "BEST_EFFORT")


def short_checks(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> list[Finding]:
    """Return problems and warnings only, from reports that are there already; asks nobody anything.

    Parameters
    ----------
    reports
        Of `nodes.check_nodes`.
    """
    return [f for f in node_findings(reports, config, cluster) if f.level in ("warn", "fail")]


def node_findings(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> list[Finding]:
    """Return a finding for each check, or one for each node that fails it."""
    return [finding for check in CHECKS for finding in check(reports, config, cluster)]


def answers(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether Slurm starts our Python on every node."""
    yield from _each(
        "node answers", reports, lambda r: "" if r.answered else r.problem,
        "see that the profile's python is on a file system that the node has, or leave the node out with "
        "-c options.exclude=NODE",
    )  # fmt: skip


def run_dir(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether every node can write the run directory."""
    mend = "set run.dir to a directory on a file system that all nodes mount and may write"
    yield from _each("run directory", _there(reports), lambda r: r.facts["run_dir"], mend)


def locks(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether HDF5 can do without the locks that a file system does not have.

    The store turns HDF5's locks off itself; but the variable, where it is set, overrides it.
    """
    there = _there(reports)
    without = [report for report in there if report.facts["lock"]]
    if not without:
        yield from _each("file locks", there, lambda _: "", "")
        return
    for report in without:
        value = cluster.environment.get("HDF5_USE_FILE_LOCKING", report.facts.get("hdf5_locking"))
        mend = "set HDF5_USE_FILE_LOCKING: FALSE in the profile's environment"
        said = report.facts["lock"]
        if value in _NO_LOCKS:
            text = f"{said}; HDF5 does without (HDF5_USE_FILE_LOCKING={value})"
            yield Finding("file locks", report.host, "ok", text)
        elif value is None:
            text = f"{said}; the store does without, other programs that read the shards may not"
            yield Finding("file locks", report.host, "warn", text, mend)
        else:
            text = f"{said}, but HDF5_USE_FILE_LOCKING={value} asks for locks"
            yield Finding("file locks", report.host, "fail", text, mend)


def scratch(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether every node has scratch that can be written and locked, with room in it."""

    def wrong(report: NodeReport) -> str:
        lock = report.facts.get("scratch_lock")
        return str(report.facts["scratch"] or (f"no file locks, {lock}" if lock else ""))

    mend = "set scratch in the profile to a directory on each node's own disk or memory"
    found = list(_each("scratch", _there(reports), wrong, mend))
    yield from found
    for report in _there(reports):
        free = report.facts["free_scratch"]
        if not wrong(report) and free < MIN_SCRATCH:
            text = f"{cluster.scratch}: {size(free)} free"
            mend = f"free {size(MIN_SCRATCH)} there, or set scratch in the profile to another directory"
            yield Finding("scratch space", report.host, "warn", text, mend)


def memory(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether /dev/shm has room for the shared segments of a node's ranks."""

    def wrong(report: NodeReport) -> str:
        if report.facts["memory"]:
            return str(report.facts["memory"])
        needed = SHM_A_RANK * config.components[report.component].ranks_per_node
        free = report.facts["free_memory"]
        return f"/dev/shm: {size(free)} free, its ranks share {size(needed)}" if free < needed else ""

    mend = "ask the site to enlarge /dev/shm, or use fewer ranks_per_node"
    yield from _each("/dev/shm", _there(reports), wrong, mend)


def cores(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether a component's ranks got the cores they will use."""

    def wrong(report: NodeReport) -> str:
        part = config.components[report.component]
        wanted = part.ranks_per_node * part.cpus_per_rank
        had = report.facts["cpus"]
        return (
            f"{part.ranks_per_node} x {part.cpus_per_rank} cores wanted, {had} given" if had < wanted else ""
        )

    mend = "unset SLURM_CPU_BIND, or lower cpus_per_rank: ranks that share a core wait for each other"
    yield from _each("cores", _there(reports), wrong, mend, level="warn")


def gpus(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether Slurm gave each node the GPUs that its ranks need."""

    def wanted(report: NodeReport) -> int:
        part = config.components[report.component]
        return int(getattr(part, "gpus_per_rank", 0)) * part.ranks_per_node

    def wrong(report: NodeReport) -> str:
        seen = visible_gpus(report.facts["gpus"])
        if len(seen) >= wanted(report):
            return ""
        return f"{wanted(report)} GPUs promised, {len(seen)} there ({', '.join(seen) or 'none'})"

    with_gpus = [report for report in _there(reports) if wanted(report)]
    if not with_gpus:
        yield Finding("GPUs", "all nodes", "skipped", "no component asks for GPUs")
        return
    mend = "correct gpus_per_node or gres in the profile, or ask for fewer with gpus_per_rank"
    yield from _each("GPUs", with_gpus, wrong, mend, fine="as many as promised")


def gpu_type(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether the GPUs are of the type that the profile says; where the driver can be asked."""
    promised = {name: _gpu_of(config, cluster, name) for name in config.components}
    concerned = [report for report in _there(reports) if promised[report.component]]
    named = [report for report in concerned if report.facts.get("gpu_names")]
    if not concerned:
        return
    if not named:
        yield Finding("GPU type", "all nodes", "skipped", "no nvidia-smi there: not checked")
        return

    def wrong(report: NodeReport) -> str:
        want = promised[report.component]
        others = [name for name in report.facts["gpu_names"] if _plain(want) not in _plain(name)]
        return f"{want} by the profile, {others[0]} by its driver" if others else ""

    mend = "correct partitions.NAME.gpu in the profile, or its partition, gres or constraint"
    yield from _each("GPU type", named, wrong, mend, level="warn")


def interface(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether the network interface of the profile exists."""

    def name(report: NodeReport) -> str:
        return interface_of(cluster, config.components[report.component])

    def wrong(report: NodeReport) -> str:
        return missing_interface(name(report), report.facts.get("interfaces", []))

    asked = [report for report in _there(reports) if name(report)]
    if not asked:
        text = "the profile names none: MPI and NCCL choose"
        yield Finding("network", "all nodes", "skipped", text)
        return
    mend = "correct interface in the profile; ip -br addr on the node lists them"
    names = ", ".join(sorted({name(report) for report in asked}))
    yield from _each("network", asked, wrong, mend, fine=f"interface {names} exists")


def clock(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether the nodes' clocks agree."""
    for report in _there(reports):
        if abs(report.skew_s) > _WARN_SKEW_S:
            way = "ahead" if report.skew_s > 0 else "behind"
            level = "fail" if "clock" in report.problem else "warn"
            text = f"{abs(report.skew_s):.1f} s {way} of {os.uname().nodename.partition('.')[0]}"
            mend = "tell the site: its time service is off there; timelines will not match"
            yield Finding("clock", report.host, level, text, mend)  # type: ignore[arg-type]
    good = [report for report in _there(reports) if abs(report.skew_s) <= _WARN_SKEW_S]
    if good:
        yield Finding("clock", _whose(good), "ok", f"within {_WARN_SKEW_S:g} s")


def packages(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether all nodes run one Python with the same packages; silent where none were asked for."""
    there = [report for report in _there(reports) if report.facts["packages"]]
    if not there:
        return
    names = ["python", *there[0].facts["packages"]]
    versions = {r.host: {"python": r.facts["python"], **r.facts["packages"]} for r in there}
    usual = {name: Counter(v[name] for v in versions.values()).most_common(1)[0][0] for name in names}

    def wrong(report: NodeReport) -> str:
        mine = versions[report.host]
        odd = [f"{n} {mine[n] or 'missing'}, elsewhere {usual[n]}" for n in names if mine[n] != usual[n]]
        lacking = [f"no {name}" for name in names if mine[name] is None and usual[name] is None]
        return "; ".join(odd + lacking)

    mend = "use one environment that all nodes see: set python in the profile"
    yield from _each("packages", there, wrong, mend, fine=f"{len(names)} versions are the same")


def model(reports: Sequence[NodeReport], config: RunConfig, cluster: Cluster) -> Iterator[Finding]:
    """Whether every node sees the model, or the place where it will be made."""
    mend = (
        "move the model to a file system that all nodes see"
        if config.model.path is not None
        else "set ROLLART_CACHE to a directory that all nodes see, in the profile's environment too"
    )
    yield from _each("model", _there(reports), lambda r: r.facts.get("see", ""), mend, fine="seen")


CHECKS: tuple[Check, ...] = (
    answers, run_dir, locks, scratch, memory, cores, gpus, gpu_type, interface, clock, packages, model,
)  # fmt: skip


def size(count: float) -> str:
    """Return bytes in words."""
    for unit, value in (("TB", 1 << 40), ("GB", GIB), ("MB", 1 << 20)):
        if count >= value:
            return f"{count / value:.{0 if count >= 10 * value else 1}f} {unit}"
    return f"{count / 1024:.0f} kB"


def _each(
    check: str,
    reports: Sequence[NodeReport],
    wrong: Callable[[NodeReport], str],
    mend: str,
    *,
    fine: str = "fine",
    level: str = "fail",
) -> Iterator[Finding]:
    """Return a line for each problem with the nodes that have it, and one for all others."""
    whose: dict[str, list[NodeReport]] = {}
    for report in reports:
        whose.setdefault(wrong(report), []).append(report)
    for text, having in whose.items():
        if text:
            yield Finding(check, _whose(having, names=8), level, text, mend)  # type: ignore[arg-type]
    if "" in whose:
        yield Finding(check, _whose(whose[""]), "ok", fine)


def _whose(reports: Sequence[NodeReport], *, names: int = 2) -> str:
    """Return the nodes' names, or their number where they are more than `names`."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    return ", ".join(hosts) if len(hosts) <= names else f"{len(hosts)} nodes"


def _there(reports: Sequence[NodeReport]) -> list[NodeReport]:
    return [report for report in reports if report.answered]


def _gpu_of(config: RunConfig, cluster: Cluster, component: str) -> str:
    """Return the type of GPU that a component was promised, empty if it gets none."""
    part = config.components[component]
    if not getattr(part, "gpus_per_rank", 0):
        return ""
    return getattr(part, "gpu", None) or cluster.partitions[partition_of(cluster, part)].gpu or ""


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
