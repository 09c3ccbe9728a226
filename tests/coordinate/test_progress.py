"""What a later attempt counts on from: nothing twice that it does anew."""

from hpc_rollart.coordinate.progress import Progress
from hpc_rollart.messages import Finished


def progress() -> Progress:
    return Progress(["lake", "words"], steps=5, t_start=0.0)


def test_what_finished_in_open_groups_is_not_counted_for_the_later_attempt_that_does_it_anew() -> None:
    before = progress()
    for trajectory, task in enumerate((0, 0, 0, 1, 1)):
        before.finished(task, Finished(trajectory, 1.0, turns=2, sampled=8, start_version=0))
    before.dropped(1)  # for good: a later attempt does not do it anew
    before.failed(1)
    after = progress()
    after.restore(before.state(cut={0, 3}))
    assert [(task.finished, task.failed) for task in after.by_task] == [(2, 0), (1, 1)]
    # The attempt itself goes on with what it has.
    assert [task.finished for task in before.by_task] == [3, 2]
