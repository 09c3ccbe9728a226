"""Each rank writes who it thinks it and the others are."""

import json
import sys

from common import say
from mpi4py import MPI

from hpc_rollart.fabric import ComponentSpec, WorldError, open_world

COMPONENTS = [
    ComponentSpec("generate", "generator", 1, pool=3),
    ComponentSpec("trainer", "trainer", 1),
    ComponentSpec("generate-big", "generator", 1, pool=5),
    ComponentSpec("env", "env", 2),
]


def main() -> None:
    """Open the world and describe it."""
    try:
        world = open_world(COMPONENTS)
    except WorldError as error:
        say(f"WorldError: {error}")
        if not MPI.Is_finalized():
            MPI.COMM_WORLD.Barrier()  # mpirun ends the others as soon as one has failed
        sys.exit(3)
    weights = world.weights_comm
    facts = {
        "rank": world.rank,
        "component": world.component,
        "role": world.role,
        "is_coordinator": world.is_coordinator,
        "coordinator": world.coordinator,
        "trainer": world.trainer,
        "generators": {str(rank): pool for rank, pool in world.generators.items()},
        "env": world.ranks_of("env"),
        "name": world.name_of(2),
        "host": world.host,
        "weights_rank": weights.rank if weights is not None else None,
        "weights_ranks": world.weights_ranks,
    }
    say(json.dumps(facts))
    world.close(graceful=True)


main()
