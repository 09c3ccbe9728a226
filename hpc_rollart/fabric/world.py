"""Opens the one MPI world and says which rank plays which role on which host.

Components are contiguous blocks of ranks in the order of the configuration; this holds for `mpirun`
on one machine and for het components of one Slurm job alike. `mpi4py` is imported inside functions
only: a top-level import would initialise MPI in every child process that re-imports the main module.
"""

import logging
import os
import socket
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, cast

from hpc_rollart.fabric.errors import WorldError

if TYPE_CHECKING:
    from mpi4py import MPI

COMPONENT_VARIABLE = "ROLLART_COMPONENT"


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """What the world must know of one component.

    Attributes
    ----------
    name
        Its key in the configuration.
    role
        `trainer`, `generator` or `env`.
    ranks
        Number of ranks; at least one.
    pool
        Pool index of a generator component, else -1.
    """

    name: str
    role: str
    ranks: int
    pool: int = -1


@dataclass(frozen=True, slots=True)
class Member:
    """One rank of the world: who it is and where it runs."""

    rank: int
    component: str
    role: str
    pool: int = -1
    host: str = ""

    @property
    def name(self) -> str:
        """`generate-compute-2 on host`: the component, the world rank, the host."""
        return f"{self.component}-{self.rank}" + (f" on {self.host}" if self.host else "")


@dataclass(slots=True)
class World:
    """This rank's view of the open MPI world.

    Attributes
    ----------
    rank, size
        World rank of this process and number of ranks.
    members
        Every rank, in rank order.
    coordinator
        First rank of the first component whose role is `env`; -1 in a world without one.
    comm
        Communicator of the mailbox (a duplicate of the world's, nobody else may use it).
    weights_comm
        Communicator of trainer and generator ranks, the first trainer rank its root 0; None on others.
    weights_ranks
        World rank of each rank of `weights_comm`, in its order.
    """

    rank: int
    size: int
    members: tuple[Member, ...]
    coordinator: int
    comm: "MPI.Intracomm"
    weights_comm: "MPI.Intracomm | None"
    weights_ranks: tuple[int, ...] = ()

    @property
    def me(self) -> Member:
        """This rank."""
        return self.members[self.rank]

    @property
    def host(self) -> str:
        """Host this rank runs on."""
        return self.me.host

    @property
    def component(self) -> str:
        """Component this rank belongs to."""
        return self.me.component

    @property
    def role(self) -> str:
        """Role of this rank's component; the coordinator's is `env`, see `is_coordinator`."""
        return self.me.role

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank is the coordinator (it then runs no environments)."""
        return self.rank == self.coordinator

    @property
    def trainer(self) -> int:
        """First trainer rank, the source of all weights."""
        return self.ranks_of("trainer")[0]

    @property
    def generators(self) -> dict[int, int]:
        """Pool index of each generator rank, in rank order."""
        return {member.rank: member.pool for member in self.members if member.role == "generator"}

    def ranks_of(self, role: str) -> tuple[int, ...]:
        """Ranks that play `role`, ascending.

        `coordinator` is one rank; `env` is all other ranks of the env components.
        """
        if role == "coordinator":
            return (self.coordinator,)
        return tuple(m.rank for m in self.members if m.role == role and m.rank != self.coordinator)

    def name_of(self, rank: int) -> str:
        """Component, rank and host of a rank, e.g. `generate-compute-2 on node17`."""
        return self.members[rank].name

    def close(self, graceful: bool, code: int = 0) -> None:
        """Leave the world.

        Parameters
        ----------
        graceful
            True when every rank is alive and closes too: MPI is finalised and this call returns.
            Otherwise the process ends here: `MPI_Finalize` hangs once a rank was lost.
        code
            Exit status of the process when not graceful.
        """
        if graceful:
            from mpi4py import MPI

            MPI.Finalize()
            return
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def layout(components: Sequence[ComponentSpec]) -> tuple[Member, ...]:
    """Assign ranks to components: contiguous blocks in the given order; hosts are left empty."""
    blocks = [spec for spec in components for _ in range(spec.ranks)]
    return tuple(Member(rank, spec.name, spec.role, spec.pool) for rank, spec in enumerate(blocks))


def open_world(components: Sequence[ComponentSpec]) -> World:
    """Initialise MPI and find out who is who; collective over all ranks.

    Parameters
    ----------
    components
        In rank order, the same on every rank.

    Raises
    ------
    WorldError
        On every rank alike, when the number of ranks is not the sum over the components, or when a
        rank's ROLLART_COMPONENT names another component than its place gives it.
    """
    import mpi4py

    # All MPI calls come from the thread of the event loop, so MPI may skip its locks; and the process
    # itself decides when to finalise, since doing so after a rank was lost never returns.
    mpi4py.rc.thread_level = "funneled"
    mpi4py.rc.finalize = False
    mpi4py.rc.errors = "exception"
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size, expected = comm.rank, comm.size, layout(components)
    problem = ""
    if size != len(expected):
        parts = " + ".join(f"{spec.ranks} {spec.name}" for spec in components)
        have = f"{size} rank" + ("s" if size > 1 else "")
        problem = f"MPI world has {have}, the config asks for {len(expected)} ({parts}): "
        problem += "was it started with mpirun?" if size == 1 else "start it with that many ranks"
    else:
        card = f"{socket.gethostname()}\n{os.environ.get(COMPONENT_VARIABLE, '')}"
        hosts, claims = zip(*(text.split("\n") for text in _share(comm, card)), strict=True)
        members = tuple(replace(m, host=host) for m, host in zip(expected, hosts, strict=True))
        for member, claim in zip(members, claims, strict=True):
            if claim and claim != member.component:
                problem = f"rank {member.rank} on {member.host} was started with {COMPONENT_VARIABLE}={claim}"
                problem += f", but the order of the config's components makes it one of {member.component}"
                break
    if problem:  # the same on every rank, so all can leave in good order
        MPI.Finalize()
        raise WorldError(problem)

    weights_ranks = tuple(m.rank for role in ("trainer", "generator") for m in members if m.role == role)
    color = 0 if rank in weights_ranks else MPI.UNDEFINED
    key = weights_ranks.index(rank) if rank in weights_ranks else 0
    weights_comm = cast("MPI.Intracomm", comm.Split(color, key))
    return World(
        rank=rank,
        size=size,
        members=members,
        coordinator=next((m.rank for m in members if m.role == "env"), -1),
        comm=comm.Dup(),
        weights_comm=weights_comm if rank in weights_ranks else None,
        weights_ranks=weights_ranks,
    )


def _share(comm: "MPI.Intracomm", text: str) -> list[str]:
    """Give every rank the text of every rank, in rank order; no pickle."""
    mine = text.encode()
    sizes = array("i", [0] * comm.size)
    comm.Allgather(array("i", [len(mine)]), sizes)
    everything = bytearray(sum(sizes))
    comm.Allgatherv(mine, [everything, list(sizes)])
    ends = list(accumulate(sizes))
    return [everything[end - size : end].decode() for end, size in zip(ends, sizes, strict=True)]
