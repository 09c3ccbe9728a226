"""Trajectory -> pool -> replica: hardware affinity (ROLLART R1), least load, sticky for life."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """The replica that serves every turn of a trajectory; `fallback` if its preferred pool had none alive."""

    pool: int
    replica: int
    fallback: bool = False


class Router:
    """Assigns each trajectory to one replica.

    Parameters
    ----------
    pools
        Pool names; a pool's index is its position.
    replicas
        Replica id (a world rank) -> pool index.

    Attributes
    ----------
    fallbacks
        Preferred pool -> trajectories routed elsewhere because no replica of it was alive.
    """

    def __init__(self, pools: Sequence[str], replicas: Mapping[int, int]) -> None:
        if len(set(pools)) != len(pools):
            raise ValueError(f"pool names must differ: {list(pools)}")
        for replica, pool in replicas.items():
            if not 0 <= pool < len(pools):
                raise ValueError(f"replica {replica}: there is no pool {pool}, only {len(pools)}")
        self._pool_index = {name: index for index, name in enumerate(pools)}
        self._pool_of = dict(replicas)
        self._assigned: dict[int, Route] = {}
        # Dicts, not sets: what a lost replica served comes back in the order it was routed.
        self._load: dict[int, dict[int, None]] = {replica: {} for replica in replicas}
        self.fallbacks: Counter[str] = Counter()

    def route(self, trajectory: int, affinity: str | None) -> Route:
        """Assign the trajectory to the least loaded living replica of the pool it prefers.

        Without affinity, or when the preferred pool has no living replica, all pools are considered. Ties go
        to the lowest id. A trajectory that is assigned keeps its replica until `release`.

        Raises
        ------
        ValueError
            If `affinity` names no pool.
        RuntimeError
            If no replica is alive.
        """
        if affinity is not None and affinity not in self._pool_index:
            raise ValueError(f"affinity {affinity!r} names no pool; there are {sorted(self._pool_index)}")
        if trajectory in self._assigned:
            return self._assigned[trajectory]
        if not self._pool_of:
            raise RuntimeError("no generator replica is alive")
        candidates, fallback = list(self._pool_of), False
        if affinity is not None:
            pool = self._pool_index[affinity]
            preferred = [replica for replica in candidates if self._pool_of[replica] == pool]
            fallback = not preferred
            self.fallbacks[affinity] += fallback
            candidates = preferred or candidates
        replica = min(candidates, key=lambda replica: (len(self._load[replica]), replica))
        route = Route(self._pool_of[replica], replica, fallback)
        self._assigned[trajectory] = route
        self._load[replica][trajectory] = None
        return route

    def assignment(self, trajectory: int) -> Route | None:
        """Where the trajectory is served, None if it is not assigned."""
        return self._assigned.get(trajectory)

    def release(self, trajectory: int) -> None:
        """The trajectory is over; unknown ones are ignored, since a cancel and an end may cross."""
        route = self._assigned.pop(trajectory, None)
        if route is not None:
            del self._load[route.replica][trajectory]

    def remove(self, replica: int) -> list[int]:
        """The replica is lost: return what it served, now unassigned, in the order it was routed."""
        self._pool_of.pop(replica, None)
        orphans = list(self._load.pop(replica, ()))
        for trajectory in orphans:
            del self._assigned[trajectory]
        return orphans

    def load(self) -> dict[int, int]:
        """Living replica -> trajectories assigned to it."""
        return {replica: len(trajectories) for replica, trajectories in self._load.items()}
