"""Starting a testbed, breaking it on purpose, and taking it down."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slurm.testbed import conf, network, processes
from slurm.testbed.settings import GPUS, Node, Settings, TestbedError

READY_S = 90.0
LOCK_S = 180.0
# Each of these shows that a directory is a testbed's; the last is that of the tests.
OWN_FILES = {"testbed.json", "testbed.lock", "testbed.users"}
# States in which a node takes jobs, as sinfo names them; a mark such as "*" (no answer) behind one counts.
HEALTHY = {"idle", "mixed", "allocated", "completing", "planned"}


@dataclass(frozen=True)
class NodeStatus:
    """What is known of a node right now."""

    node: Node
    state: str
    processes: int
    daemon: bool
    stopped: bool
    plugged: bool

    @property
    def healthy(self) -> bool:
        return self.daemon and self.plugged and not self.stopped and self.state in HEALTHY

    @property
    def given_up(self) -> bool:
        """Whether the node itself is well, but Slurm has set it aside."""
        aside = self.state.startswith(("down", "drain", "fail"))
        return aside and self.daemon and self.plugged and not self.stopped

    @property
    def text(self) -> str:
        notes = [self.state]
        notes += ["killed"] * (not self.processes)
        notes += ["paused"] * self.stopped
        notes += ["cut"] * (not self.plugged)
        return ", ".join(notes)


@contextlib.contextmanager
def lock(directory: Path, deadline_s: float = LOCK_S) -> Iterator[None]:
    """Keep others from changing the testbed in a directory meanwhile."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        content = set(os.listdir(directory))
        # Folders in it are going to be removed, so it must not be somebody's home, let alone the root.
        if content and not content & OWN_FILES:
            raise TestbedError(f"{directory} holds other things than a testbed; choose another with --dir")
        directory.chmod(0o755)
        handle = os.open(directory / "testbed.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise TestbedError(f"{directory}: {error.strerror}; choose another directory with --dir") from None
    try:
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() - start > deadline_s:
                    raise TestbedError(
                        f"another command has held {directory} for {deadline_s:.0f} s; end it, or wait"
                    ) from None
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def _daemon_env(**extra: str) -> dict[str, str]:
    # Nothing of the caller's shell may reach a daemon, and through it the jobs: no SLURM_* above all.
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        **extra,
    }


def _spawn(command: list[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=env,
            cwd="/",
            start_new_session=True,
        )


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else "it said nothing"


class Cluster:
    """The testbed of some settings."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._started: list[tuple[str, subprocess.Popen[bytes], Path]] = []
        self._since: dict[str, int] = {}

    # -- looking --

    def ask(self, *command: str, timeout: float = 20.0) -> str:
        """Run a Slurm command against this cluster; an empty text if it fails."""
        try:
            done = subprocess.run(
                command, env=_daemon_env(**self.settings.env), capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return ""
        return done.stdout if done.returncode == 0 else ""

    def head_alive(self) -> bool:
        names = {processes.name(pid) for pid in processes.marked(self.settings.dir)}
        return {"munged", "slurmctld"} <= names and network.owner(self.settings) == ""

    def node_processes(self, node: Node) -> list[int]:
        return processes.in_namespace(network.namespace_path(self.settings, node))

    def status(self) -> list[NodeStatus]:
        states = {}
        if self.head_alive():
            text = self.ask("sinfo", "--noheader", "--Node", "--partition=low", "--format=%n %T")
            states = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
        found = []
        for node in self.settings.nodes:
            pids = self.node_processes(node)
            daemons = [pid for pid in pids if processes.name(pid) == "slurmd"]
            found.append(
                NodeStatus(
                    node=node,
                    state=states.get(node.name, "unknown"),
                    processes=len(pids),
                    daemon=bool(daemons),
                    stopped=any(processes.state(pid) == "T" for pid in daemons),
                    plugged=network.plugged(self.settings, node),
                )
            )
        return found

    # -- starting --

    def start(self) -> None:
        """Start everything, in a directory in which nothing runs."""
        settings = self.settings
        network.check_free(settings)
        self._write_files()
        network.build(settings)
        self._start_head()
        for node in settings.nodes:
            self._start_daemon(node)
        self.wait_ready(settings.nodes)

    def repair(self) -> list[str]:
        """Bring back what a living head misses, and return the names of the nodes that were not well."""
        sick = [status for status in self.status() if not status.healthy]
        for status in sick:
            self.bring_back(status.node)
        self.wait_ready([status.node for status in sick])
        return [status.node.name for status in sick]

    def bring_back(self, node: Node) -> None:
        """Undo kill, pause and cut for a node."""
        network.plug(self.settings, node, up=True)
        processes.send(self.node_processes(node), signal.SIGCONT)
        status = next(status for status in self.status() if status.node == node)
        if not status.daemon:
            self.kill(node)  # what a dead slurmd left would be in the way of the next
            # A host takes longer to boot than Slurm to give it up, and its jobs with it. This one boots in no
            # time, and then Slurm would take the jobs that died for running, for minutes.
            self.ask("scontrol", "update", f"nodename={node.name}", "state=down", "reason=killed")
            self._start_daemon(node)

    def _write_files(self) -> None:
        settings = self.settings
        # A new cluster knows no old jobs.
        for old in ("state", "run", "munge", "etc"):
            shutil.rmtree(settings.dir / old, ignore_errors=True)
        for new in ("etc", "state", "run", "log", "munge", "dev", "shared"):
            (settings.dir / new).mkdir(exist_ok=True)
        settings.shared.chmod(0o1777)
        for log in (settings.dir / "log").iterdir():
            log.unlink()
        key = settings.dir / "munge" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for index in range(GPUS):
            device = settings.dir / "dev" / f"gpu{index}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
        etc = settings.dir / "etc"
        settings.conf.write_text(conf.slurm_conf(settings))
        (etc / "gres.conf").write_text(conf.gres_conf(settings))
        (etc / "cgroup.conf").write_text(conf.cgroup_conf())
        (etc / "hosts").write_text(conf.hosts(settings))
        (settings.dir / "run" / "head.sh").write_text(conf.head_script(settings))
        for node in settings.nodes:
            script = settings.dir / "run" / f"{node.name}.sh"
            script.write_text(conf.node_script(settings, node.name))
        settings.save()

    def _start_head(self) -> None:
        settings, directory = self.settings, self.settings.dir
        mark = _daemon_env(**{processes.MARK: str(directory)})
        munge = directory / "munge"
        # --force: munged frowns upon running as root and upon directories that others may read.
        command = ["munged", "--foreground", "--force", f"--key-file={munge}/munge.key"]
        command += [f"--socket={settings.socket}", f"--pid-file={directory}/run/munged.pid"]
        command += [f"--seed-file={munge}/munged.seed"]
        log = directory / "log" / "munged.out"
        self._started.append(("munged", _spawn(command, log, mark), log))
        self._wait(
            lambda: bool(self.ask("munge", f"--socket={settings.socket}", "--no-input")),
            "munged to answer",
            30.0,
        )
        log = directory / "log" / "slurmctld.out"
        command = ["unshare", "--mount", "--uts", "bash", str(directory / "run" / "head.sh")]
        self._started.append(("slurmctld", _spawn(command, log, mark), log))
        self._wait(lambda: "is UP" in self.ask("scontrol", "ping"), "slurmctld to answer", 30.0)

    def _start_daemon(self, node: Node) -> None:
        settings = self.settings
        log = settings.dir / "log" / f"{node.name}.out"
        command = [
            "nsenter",
            f"--net={network.namespace_path(settings, node)}",
            "unshare",
            "--mount",
            "--uts",
        ]
        command += ["bash", str(settings.dir / "run" / f"{node.name}.sh")]
        self._since[node.name] = int(time.time())
        self._started.append((f"slurmd of {node.name}", _spawn(command, log, _daemon_env()), log))

    def _wait(self, met: Callable[[], bool], what: str, deadline_s: float) -> None:
        """Wait until something holds, but not longer than a daemon that was started lives."""
        start = time.monotonic()
        while not met():
            for name, process, log in self._started:
                if process.poll() is not None:
                    raise TestbedError(
                        f"{name} ended with code {process.returncode}: {_tail(log)} (see {log})"
                    )
            if time.monotonic() - start > deadline_s:
                raise TestbedError(
                    f"waited {deadline_s:.0f} s for {what}; see the logs in {self.settings.dir}/log"
                )
            time.sleep(0.1)

    def wait_ready(self, nodes: tuple[Node, ...] | list[Node], deadline_s: float = READY_S) -> None:
        """Wait until nodes take jobs."""
        names = {node.name for node in nodes}
        resumed: set[str] = set()

        def ready() -> bool:
            sick = [status for status in self.status() if status.node.name in names and not status.healthy]
            for status in sick:
                # Slurm asks a node that it has given up only every few minutes whether it is back.
                if status.given_up and status.node.name not in resumed:
                    resumed.add(status.node.name)
                    self.ask("scontrol", "update", f"nodename={status.node.name}", "state=resume")
            if sick:
                return False
            # Slurm goes on calling a node idle for a while whose slurmd is gone; only what the
            # new one said of itself counts.
            known = self._slurmd_starts()
            return all(known.get(name, 0) >= self._since.get(name, 0) for name in names)

        self._wait(ready, f"{', '.join(sorted(names))} to be idle", deadline_s)

    def _slurmd_starts(self) -> dict[str, int]:
        """Return when each node's slurmd started, as Slurm knows it."""
        text = self.ask("env", "TZ=UTC", "scontrol", "--oneliner", "show", "node")
        found = re.findall(r"NodeName=(\S+) .*SlurmdStartTime=(\d\S+)", text)
        return {
            name: int(datetime.fromisoformat(start).replace(tzinfo=UTC).timestamp()) for name, start in found
        }

    # -- breaking --

    def kill(self, node: Node) -> None:
        # Stopped first: at a loss of power nobody sees another die and tells of it, as srun's second process
        # would, which cancels the step once the first is gone.
        self.pause(node)
        processes.end(lambda: self.node_processes(node), node.name)

    def pause(self, node: Node) -> int:
        return processes.stop(lambda: self.node_processes(node), node.name)

    def resume(self, node: Node) -> int:
        pids = self.node_processes(node)
        processes.send(pids, signal.SIGCONT)
        return len(pids)

    def plug(self, node: Node, up: bool) -> None:
        network.plug(self.settings, node, up)

    # -- ending --

    def take_down(self) -> None:
        """End and remove all that runs or is mounted; the files stay. Safe to repeat, whatever is left."""
        settings = self.settings
        # The head first: it would start jobs anew that die with their nodes.
        processes.end(lambda: processes.marked(settings.dir), "the head's daemons", patience_s=5.0)
        if network.owner(settings):
            return  # the names are another's
        for namespace in network.namespaces(settings.bridge):
            processes.end(lambda path=namespace: processes.in_namespace(path), namespace.name)  # type: ignore[misc]
        network.remove(settings)

    def purge(self) -> None:
        """Remove the directory and all that is in it."""
        shutil.rmtree(self.settings.dir, ignore_errors=True)
