"""What a testbed consists of: its nodes, its names and where its files lie."""

from __future__ import annotations

import ipaddress
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

DEFAULT_DIR = "/var/lib/rollart-testbed"
DEFAULT_BRIDGE = "rollart0"
# Slurm's own default, so that a run has the time that it has elsewhere.
DEFAULT_DOWN_AFTER_S = 300
DEFAULT_SUBNET = "10.77.0.0/24"
CHECKOUT = Path(__file__).resolve().parents[2]

CPUS = 8
MEMORY_MB = 8000
GPUS = 2
# The head has the first address; the nodes start here, so that a glance at an address tells them apart.
FIRST_NODE = 11

# slurm.conf separates by commas and blanks and knows no quoting, so paths with others are refused.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/+-]*\Z")
_PLAIN_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}\Z")
# A link's name has 15 characters at most, and a node's link is the bridge's name and up to four more.
_BRIDGE = re.compile(r"[a-z][a-z0-9]{0,10}\Z")
# The kernel allows 107 characters for a socket's path.
_SOCKET_MAX = 100


class TestbedError(Exception):
    """What the person at the keyboard has to be told, mend included, in one line."""

    __test__ = False  # pytest would take the name for a test class


@dataclass(frozen=True)
class Node:
    """One host of the cluster.

    Parameters
    ----------
    name
        Its host name.
    partition
        The partition of its own kind. Every node is in ``low`` as well.
    gpu
        The type of its fake GPUs, or an empty text for a node without.
    """

    name: str
    partition: str
    gpu: str = ""


# Sorted by name they are in another order than a run has them in, as on most clusters.
DEFAULT_NODES = (
    Node("h100-1", "h100", "h100"),
    Node("h20-1", "h20", "h20"),
    Node("h20-2", "h20", "h20"),
    Node("cpu-1", "cpu"),
    Node("cpu-2", "cpu"),
)


@dataclass(frozen=True)
class Settings:
    """All that is chosen when a testbed is started; kept in its directory until it is taken down.

    Parameters
    ----------
    dir
        The directory that holds all state.
    bridge
        The bridge's name, and the beginning of the names of links and namespaces.
    subnet
        The network of the head and the nodes.
    nodes
        The hosts.
    shares
        Paths below ``/tmp`` that the nodes see in spite of their private ``/tmp``.
    down_after_s
        Slurm's SlurmdTimeout: how long a node may be silent before it is down and its jobs are ended.
    starts
        How often a testbed was started in this directory. Job ids begin at 1000 times that, so that an id
        never means two jobs.
    """

    dir: Path
    bridge: str = DEFAULT_BRIDGE
    subnet: str = DEFAULT_SUBNET
    nodes: tuple[Node, ...] = DEFAULT_NODES
    shares: tuple[str, ...] = field(default=())
    down_after_s: int = DEFAULT_DOWN_AFTER_S
    starts: int = 1

    def __post_init__(self) -> None:
        if not _PLAIN_PATH.match(str(self.dir)):
            raise TestbedError(
                f"--dir {self.dir}: Slurm wants an absolute path of letters, digits and . _ + -; choose one"
            )
        if len(str(self.socket)) > _SOCKET_MAX:
            raise TestbedError(f"--dir {self.dir} is too long for the path of a socket; choose a shorter one")
        if not _BRIDGE.match(self.bridge):
            raise TestbedError(
                f"--bridge {self.bridge}: use up to 11 lower-case letters and digits, a letter first"
            )
        if not 10 <= self.down_after_s <= 3600:
            raise TestbedError("--down-after: give 10 to 3600 seconds")
        if self.network.num_addresses < FIRST_NODE + len(self.nodes) + 2:
            raise TestbedError(f"--subnet {self.subnet} is too small for the nodes; use a /24")
        names = [node.name for node in self.nodes]
        for text in [*names, *(node.partition for node in self.nodes)]:
            if not _PLAIN_NAME.match(text):
                raise TestbedError(f"--nodes: {text!r} is no name; use lower-case letters, digits and -")
        if not names or len(set(names)) < len(names):
            raise TestbedError("--nodes: name at least one node, and none twice")
        if {"low", "broken"} & {node.partition for node in self.nodes}:
            raise TestbedError("--nodes: partitions low and broken are made anyway; choose other names")

    @property
    def network(self) -> ipaddress.IPv4Network:
        try:
            return ipaddress.IPv4Network(self.subnet)
        except ValueError as error:
            raise TestbedError(f"--subnet {self.subnet}: {error}; write it like {DEFAULT_SUBNET}") from None

    @property
    def conf(self) -> Path:
        return self.dir / "etc" / "slurm.conf"

    @property
    def socket(self) -> Path:
        return self.dir / "munge" / "socket"

    @property
    def shared(self) -> Path:
        return self.dir / "shared"

    @property
    def file(self) -> Path:
        return self.dir / "testbed.json"

    @property
    def head_address(self) -> str:
        return str(self.network[1])

    @property
    def env(self) -> dict[str, str]:
        """What a shell needs to talk to this cluster."""
        return {"SLURM_CONF": str(self.conf), "ROLLART_TESTBED_DIR": str(self.dir)}

    @property
    def partitions(self) -> dict[str, list[Node]]:
        """The partitions of one kind of node each, in the order of the nodes."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.partition, []).append(node)
        return found

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise TestbedError(f"no node is called {name!r}; there are {known}")

    def address(self, node: Node) -> str:
        return str(self.network[FIRST_NODE + self.nodes.index(node)])

    def link(self, node: Node) -> str:
        """The name of the end of the node's cable that is plugged into the bridge."""
        return f"{self.bridge}-{FIRST_NODE + self.nodes.index(node)}"

    def namespace(self, node: Node) -> str:
        return f"{self.bridge}-{node.name}"

    def differences(self, other: Settings) -> list[str]:
        """Return the options that were chosen otherwise."""
        options = ("bridge", "subnet", "nodes", "shares", "down_after_s")
        return [
            "--" + {"shares": "share", "down_after_s": "down-after"}.get(name, name)
            for name in options
            if getattr(self, name) != getattr(other, name)
        ]

    def save(self) -> None:
        text = json.dumps(asdict(self) | {"dir": str(self.dir)}, indent=1)
        new = self.file.with_suffix(".new")
        new.write_text(text + "\n")
        os.replace(new, self.file)


def load(directory: Path) -> Settings | None:
    """Return the settings of the testbed in a directory, or None where there never was one."""
    path = directory / "testbed.json"
    try:
        raw = json.loads(path.read_text())
        nodes = tuple(Node(**node) for node in raw.pop("nodes"))
        shares = tuple(raw.pop("shares"))
        return Settings(**(raw | {"dir": directory}), nodes=nodes, shares=shares)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise TestbedError(f"{path} is damaged; remove the file and run up again") from None


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Read ``name:partition[:gputype],...``."""
    nodes = []
    for part in text.split(","):
        fields = part.strip().split(":")
        if len(fields) not in (2, 3):
            raise TestbedError(f"--nodes: {part!r} is not name:partition or name:partition:gputype")
        nodes.append(Node(*fields))
    return tuple(nodes)


def shares_for(directory: Path, extra: list[str]) -> tuple[str, ...]:
    """Return the paths that must stay visible below the nodes' private ``/tmp``.

    The checkout and the testbed's own directory are added where they lie below ``/tmp``.
    """
    chosen: list[str] = []
    for text in extra:
        path = Path(text).resolve()
        if not path.is_dir():
            raise TestbedError(f"--share {text}: there is no such directory; make it first")
        if Path("/tmp") not in path.parents:
            raise TestbedError(f"--share {text} is not below /tmp, so the nodes see it anyway; leave it out")
        chosen.append(str(path))
    chosen += [str(path) for path in (directory, CHECKOUT) if Path("/tmp") in path.parents]
    # A path below another one that is shared is there already.
    unique = sorted(set(chosen))
    return tuple(p for p in unique if not any(Path(q) in Path(p).parents for q in unique))
