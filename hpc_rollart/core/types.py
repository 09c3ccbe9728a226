"""The plain data that goes into and comes out of the ledger."""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["async", "one_off", "sync"]
Failure = Literal["env_failed", "reward_failed"]
Dropped = Literal["stale", "surplus"]
Status = Literal["ok", "stale", "surplus", "env_failed", "reward_failed"]

FAILURES: tuple[Failure, ...] = ("env_failed", "reward_failed")
STATUSES: tuple[Status, ...] = ("ok", "stale", "surplus", "env_failed", "reward_failed")


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the mix; groups are given out in proportion to `weight`."""

    name: str
    weight: float = 1.0
    affinity: str | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.weight < float("inf"):
            raise ValueError(f"task {self.name!r}: weight must be positive and finite, not {self.weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the ledger goes by; fixed for a run.

    Attributes
    ----------
    group_size
        Trajectories that make a group complete, all from one environment seed.
    groups_per_batch
        Complete groups a batch consumes.
    total_steps
        Batches the run trains on; no group is admitted for a later one.
    seed
        Root of every environment and sampling seed.
    alpha
        A trajectory that started at version b may be trained from version n iff n - b <= alpha.
    mode
        `async`; `one_off` (alpha 1, new weights are installed only when the generators have drained);
        `sync` (alpha 0, otherwise exactly the rules of `async`).
    redundant_groups, redundant_members
        Extra groups admitted per batch, extra members dispatched per group; what comes in last is cancelled.
    share_patience
        How long a batch that could be cut waits for a task that is short of its share, as a multiple of the
        time since the batch before was cut; see `shares`.
    share_hold_max_s
        The longest such wait in seconds.
    retry_attempts
        A member that failed this often is given up.
    backoff_s, backoff_max_s
        Seconds before a member's first replacement; doubles with each failure up to the maximum. The same
        two numbers space out the admissions of a task whose groups had to be dropped.
    """

    group_size: int
    groups_per_batch: int
    total_steps: int
    seed: int = 0
    alpha: int = 1
    mode: Mode = "async"
    redundant_groups: int = 0
    redundant_members: int = 0
    share_patience: float = 1.0
    share_hold_max_s: float = float("inf")
    retry_attempts: int = 3
    backoff_s: float = 1.0
    backoff_max_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("group_size", "groups_per_batch", "total_steps", "retry_attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("alpha", "redundant_groups", "redundant_members", "share_patience", "share_hold_max_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, is {getattr(self, name)}")
        if not 0.0 < self.backoff_s <= self.backoff_max_s:
            # Without any back-off a broken task would take back at once the place that it just gave up.
            raise ValueError(
                "backoff_s must be positive and at most backoff_max_s, "
                f"is {self.backoff_s} with backoff_max_s {self.backoff_max_s}"
            )
        required = {"sync": 0, "one_off": 1}.get(self.mode, self.alpha)
        if self.alpha != required:
            raise ValueError(f"mode {self.mode!r} requires alpha {required}, not {self.alpha}")

    def backoff(self, failures: int) -> float:
        """Seconds to wait after the `failures`-th failure in a row (1 is the first)."""
        # The exponent is bounded so that a long streak cannot overflow a float.
        return min(self.backoff_max_s, self.backoff_s * 2.0 ** min(failures - 1, 64))


@dataclass(frozen=True, slots=True)
class Admission:
    """Leave to run one trajectory; the driver picks the env rank and asks the router for a replica.

    `task` is an index into the ledger's tasks. `env_seed` is the group's; `sample_seed` is this member's and
    attempt's own. Both are 63-bit.
    """

    trajectory: int
    group: int
    member: int
    attempt: int
    task: int
    env_seed: int
    sample_seed: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """End (in flight) or drop (finished) this trajectory; `status` is its final one."""

    trajectory: int
    status: Dropped


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One consumed trajectory, `ok` for good; `staleness` is the version trained from - `start_version`."""

    trajectory: int
    group: int
    member: int
    task: int
    reward: float
    start_version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What step `step` trains on, from weight version `version` (equal to `step`); by group, then member."""

    step: int
    version: int
    items: tuple[BatchItem, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """One open group as a display shows it; `start_version` is its oldest member's, None before any token."""

    group: int
    task: int
    finished: int
    running: int
    waiting: int
    complete: bool
    start_version: int | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The ledger at a glance.

    `step` batches have been cut, `version` is the lowest installed, `room` groups may be open in all,
    `in_flight` trajectories are running.
    """

    step: int
    version: int
    room: int
    in_flight: int
    groups: tuple[GroupView, ...]

    @property
    def complete(self) -> int:
        """Open groups that wait only to be consumed."""
        return sum(view.complete for view in self.groups)

    @property
    def open(self) -> int:
        """Open groups that still lack members."""
        return len(self.groups) - self.complete
