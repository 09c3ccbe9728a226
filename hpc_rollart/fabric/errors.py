"""Names what can go wrong between ranks; every error says which rank and where it runs."""


class FabricError(Exception):
    """Base of all errors of the fabric."""


class WorldError(FabricError):
    """The MPI world is not the one the configuration asks for."""


class DeadlineExceeded(FabricError, TimeoutError):
    """A rank did not answer in time.

    Attributes
    ----------
    what
        The thing waited for.
    ranks
        World ranks that were waited for.
    seconds
        How long the wait lasted.
    """

    def __init__(self, what: str, ranks: dict[int, str], seconds: float) -> None:
        where = ", ".join(f"rank {rank} ({name})" for rank, name in sorted(ranks.items()))
        super().__init__(f"{what}: nothing from {where} within {seconds:g} s")
        self.what = what
        self.ranks = tuple(sorted(ranks))
        self.seconds = seconds


class RankLost(FabricError):
    """A rank died, so it can neither be sent to nor answer.

    Attributes
    ----------
    rank
        World rank of the one lost.
    name
        Its component and host.
    """

    def __init__(self, rank: int, name: str, what: str = "") -> None:
        super().__init__(f"{what + ': ' if what else ''}rank {rank} ({name}) was lost")
        self.rank = rank
        self.name = name
