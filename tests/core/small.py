"""Small ledgers and what is done to them, for tests of single rules."""

from hpc_rollart.core.ledger import Ledger
from hpc_rollart.core.types import Admission, Cancel, Rules, Task

PLENTY = 1000


def make_rules(**given: object) -> Rules:
    defaults: dict[str, object] = {"group_size": 2, "groups_per_batch": 2, "total_steps": 10, "alpha": 1}
    return Rules(**(defaults | given))  # type: ignore[arg-type]


def make_ledger(*tasks: Task, **given: object) -> Ledger:
    return Ledger(make_rules(**given), tasks or (Task("task"),))


def finish(ledger: Ledger, admissions: list[Admission], version: int = 0) -> list[Cancel]:
    return [cancel for a in admissions for cancel in ledger.finished(a.trajectory, 1.0, version)]


def of_group(admissions: list[Admission], *groups: int) -> list[Admission]:
    return [admission for admission in admissions if admission.group in groups]


def groups_of(admissions: list[Admission]) -> list[int]:
    return sorted({admission.group for admission in admissions})


def cut(ledger: Ledger) -> tuple[list[int], dict[int, str]]:
    """The groups of the next batch, and the cancels that it causes."""
    result = ledger.cut_batch(0.0)
    assert result is not None
    batch, cancels = result
    groups = sorted({item.group for item in batch.items})
    return groups, {cancel.trajectory: cancel.status for cancel in cancels}


def fail_group(ledger: Ledger, member: Admission, now: float) -> list[Cancel]:
    """Fail the first attempt of a member under `retry_attempts=1`."""
    return ledger.failed(member.trajectory, "env_failed", "boom", now)
