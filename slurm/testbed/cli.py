"""The verbs of ``python3 -m slurm.testbed``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from slurm.testbed import settings as choices
from slurm.testbed.cluster import Cluster, lock
from slurm.testbed.settings import GPUS, Settings, TestbedError

# What is needed, and the package of Debian and Ubuntu that has it.
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}
NODE_VERBS = {
    "kill": "end every process of a node at once with SIGKILL, slurmd included",
    "start": "bring a killed node back",
    "pause": "stop every process of a node with SIGSTOP",
    "resume": "let a paused node go on",
    "cut": "take a node's network away",
    "mend": "give a node its network back",
}


def missing() -> str | None:
    """Return what this machine lacks for a testbed and how to get it, or None if it lacks nothing."""
    if sys.platform != "linux":
        return "the testbed needs Linux; use a machine or a virtual machine that has it"
    found = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    packages = [package for program, package in PROGRAMS.items() if not shutil.which(program, path=found)]
    if packages:
        # The plugins are no program, so they are named whenever Slurm is.
        packages += ["slurm-wlm-basic-plugins"] * ("slurmd" in packages)
        names = " ".join(sorted(set(packages)))
        return (
            f"the testbed needs root and Slurm: apt-get install --no-install-recommends {names} "
            "(and libpmix-dev, for srun --mpi=pmix only)"
        )
    if os.geteuid() != 0:
        return "the testbed needs root, for network namespaces; run it with sudo"
    allowed = subprocess.run(["unshare", "--mount", "--uts", "--net", "true"], capture_output=True, text=True)
    if allowed.returncode:
        return (
            f"the testbed needs a machine or a container that may make namespaces ({allowed.stderr.strip()})"
        )
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m slurm.testbed", description="A real Slurm cluster of several hosts on this machine."
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "--dir",
        type=Path,
        default=Path(os.environ.get("ROLLART_TESTBED_DIR") or choices.DEFAULT_DIR),
        help="directory of all state (default: $ROLLART_TESTBED_DIR, else %(default)s)",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser("up", parents=[common], help="start it, or mend what is missing of it")
    up.add_argument(
        "--bridge", help=f"name of the bridge (default: as last time, or else {choices.DEFAULT_BRIDGE})"
    )
    up.add_argument(
        "--subnet", help=f"network of the nodes (default: as last time, or else {choices.DEFAULT_SUBNET})"
    )
    up.add_argument(
        "--down-after",
        type=int,
        metavar="SECONDS",
        help=f"when a silent node is down (default: as last time, or else {choices.DEFAULT_DOWN_AFTER_S})",
    )
    up.add_argument("--nodes", metavar="NAME:PARTITION[:GPUTYPE],...", help="other nodes than the usual five")
    up.add_argument(
        "--share",
        action="append",
        default=[],
        metavar="PATH",
        help="a path below /tmp that nodes are to see",
    )
    down = verbs.add_parser("down", parents=[common], help="end it and remove all but the files")
    down.add_argument("--purge", action="store_true", help="remove the files too, the shared folder included")
    verbs.add_parser("status", parents=[common], help="show it; the exit code is 0 only if all is well")
    verbs.add_parser("env", parents=[common], help="print what a shell needs, for eval")
    for verb, text in NODE_VERBS.items():
        verbs.add_parser(verb, parents=[common], help=text).add_argument("node")
    return parser


def _loaded(directory: Path) -> Settings:
    settings = choices.load(directory)
    if settings is None:
        raise TestbedError(f"there is no testbed in {directory}; start it with: python3 -m slurm.testbed up")
    return settings


def _table(cluster: Cluster) -> bool:
    """Print the state of the nodes and return whether all is well."""
    rows = [("node", "partition", "GPUs", "state", "processes")]
    if not cluster.head_alive():
        print(f"the testbed in {cluster.settings.dir} is down")
        return False
    statuses = cluster.status()
    for status in statuses:
        gpus = f"{GPUS} {status.node.gpu}" if status.node.gpu else "-"
        rows.append((status.node.name, status.node.partition, gpus, status.text, str(status.processes)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return all(status.healthy for status in statuses)


def _exports(settings: Settings) -> str:
    return "\n".join(f"export {key}={shlex.quote(value)}" for key, value in settings.env.items())


def _up(options: argparse.Namespace) -> int:
    with lock(options.dir):
        old = choices.load(options.dir)
        # What is not said is as it was the last time in this directory.
        nodes = old.nodes if old else choices.DEFAULT_NODES
        nodes = choices.parse_nodes(options.nodes) if options.nodes else nodes
        kept = [share for share in old.shares if Path(share).is_dir()] if old else []
        wanted = Settings(
            dir=options.dir,
            bridge=options.bridge or (old.bridge if old else choices.DEFAULT_BRIDGE),
            subnet=options.subnet or (old.subnet if old else choices.DEFAULT_SUBNET),
            nodes=nodes,
            down_after_s=options.down_after or (old.down_after_s if old else choices.DEFAULT_DOWN_AFTER_S),
            shares=choices.shares_for(options.dir, options.share or kept),
            starts=old.starts + 1 if old else 1,
        )
        running = old is not None and Cluster(old).head_alive()
        if old is not None and running:
            if differences := old.differences(wanted):
                raise TestbedError(
                    f"the testbed in {options.dir} is up with another {', '.join(differences)}; "
                    "take it down first: python3 -m slurm.testbed down"
                )
            cluster = Cluster(old)
            mended = cluster.repair()
            print(f"mended: {', '.join(mended)}" if mended else f"the testbed in {options.dir} is up already")
        else:
            Cluster(old or wanted).take_down()  # what a crash has left
            cluster = Cluster(wanted)
            try:
                cluster.start()
            except BaseException:
                cluster.take_down()
                raise
        _table(cluster)
        print(f"export SLURM_CONF={cluster.settings.conf}")
    return 0


def _down(options: argparse.Namespace) -> int:
    if not options.dir.is_dir():
        print(f"there is no testbed in {options.dir}")
        return 0
    with lock(options.dir):
        cluster = Cluster(choices.load(options.dir) or Settings(dir=options.dir))
        cluster.take_down()
        if options.purge:
            cluster.purge()
    print(f"the testbed in {options.dir} is down" + (" and removed" if options.purge else ""))
    return 0


def _change_node(options: argparse.Namespace) -> int:
    settings = _loaded(options.dir)
    node = settings.node(options.node)
    with lock(options.dir):
        cluster = Cluster(settings)
        if not cluster.head_alive():
            raise TestbedError(
                f"the testbed in {options.dir} is not up; start it: python3 -m slurm.testbed up"
            )
        match options.verb:
            case "kill":
                cluster.kill(node)
            case "start":
                cluster.bring_back(node)
                cluster.wait_ready([node])
            case "pause":
                cluster.pause(node)
            case "resume":
                cluster.resume(node)
                cluster.wait_ready([node])
            case "cut":
                cluster.plug(node, up=False)
            case "mend":
                cluster.plug(node, up=True)
                cluster.wait_ready([node])
    print(f"{options.verb} {node.name}: done")
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.verb == "env":
        print(_exports(_loaded(options.dir)))
        return 0
    if lack := missing():
        raise TestbedError(lack)
    match options.verb:
        case "up":
            return _up(options)
        case "down":
            return _down(options)
        case "status":
            return 0 if _table(Cluster(_loaded(options.dir))) else 1
        case _:
            return _change_node(options)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    options.dir = Path(os.path.abspath(options.dir))
    # The daemons' programs are where a login shell of another user than root does not look.
    os.environ["PATH"] = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    try:
        code = _run(options)
        sys.stdout.flush()
        return code
    except TestbedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has seen enough; all is done by the time that anything is printed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (OSError, subprocess.SubprocessError) as error:
        print(f"error: {error}; run down, then up again", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; python3 -m slurm.testbed down removes what there is", file=sys.stderr)
        return 130
