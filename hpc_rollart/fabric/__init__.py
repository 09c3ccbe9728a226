"""Links the ranks of one MPI world: who is who, and typed messages between them."""

from hpc_rollart.fabric.errors import DeadlineExceeded, FabricError, RankLost, WorldError
from hpc_rollart.fabric.mailbox import Mailbox
from hpc_rollart.fabric.world import ComponentSpec, Member, World, open_world

__all__ = [
    "ComponentSpec",
    "DeadlineExceeded",
    "FabricError",
    "Mailbox",
    "Member",
    "RankLost",
    "World",
    "WorldError",
    "open_world",
]
