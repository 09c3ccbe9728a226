"""Runs a world on this machine to its end."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from hpc_rollart.config.schema import RunConfig
from hpc_rollart.launch.attempt import Attempt
from hpc_rollart.launch.mpirun import LocalLauncher
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.world import RANK_MODULE, Outcome, World

_POLL_S = 0.25


def run_world(
    config: RunConfig,
    run: RunDir,
    on_poll: Callable[[World], None],
    *,
    attempt: Attempt | None = None,
    rank_module: str = RANK_MODULE,
) -> Outcome:
    """Run a world to its end and return how it ended.

    SIGINT, SIGTERM and SIGHUP ask it to stop; a second one ends it at once.

    Parameters
    ----------
    config, run, attempt, rank_module
        As `World`; the attempt is the run's first if none is given.
    on_poll
        Called four times a second.

    Raises
    ------
    LaunchError
        There is no mpirun to start it with.
    """
    start = attempt or Attempt(0)
    with stop_requests() as asked, World(config, run, start, LocalLauncher(), rank_module) as world:
        heard = 0
        while (outcome := world.poll()) is None:
            if asked() > heard:
                heard += 1
                world.stop()
            on_poll(world)
            time.sleep(_POLL_S)
    return outcome


@contextlib.contextmanager
def stop_requests(
    numbers: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
) -> Iterator[Callable[[], int]]:
    """Count stop signals instead of dying of them; yields a function that returns the count so far."""
    count = 0

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1

    if threading.current_thread() is not threading.main_thread():
        yield lambda: count  # only the main thread may handle signals
        return
    # A signal that is ignored stays so: nohup ignores SIGHUP on purpose.
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, note)
    try:
        yield lambda: count
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
