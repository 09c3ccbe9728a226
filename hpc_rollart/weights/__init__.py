"""Carries each new version of the weights from the trainer to the generators while both keep working."""

from hpc_rollart.weights.errors import TransportError, WeightSyncError
from hpc_rollart.weights.mpi_transport import MpiTransport
from hpc_rollart.weights.plan import Plan, describe, make_plan
from hpc_rollart.weights.publisher import Publisher, PublishTiming
from hpc_rollart.weights.subscriber import Subscriber
from hpc_rollart.weights.transport import Messenger, Transfer, Transport

__all__ = [
    "Messenger",
    "MpiTransport",
    "Plan",
    "PublishTiming",
    "Publisher",
    "Subscriber",
    "Transfer",
    "Transport",
    "TransportError",
    "WeightSyncError",
    "describe",
    "make_plan",
]
