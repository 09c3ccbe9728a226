"""Names what can go wrong while weights travel."""

from hpc_rollart.errors import RunFailed


class TransportError(Exception):
    """The library that moves the bytes reported a failure."""


class WeightSyncError(RunFailed):
    """A version of the weights did not reach every generator; the text names the rank and its host."""
