"""Runs a world on this machine to its end."""

import signal
import time
from collections.abc import Callable

from hpc_rollart.config.schema import RunConfig
from hpc_rollart.launch.attempt import Attempt
from hpc_rollart.launch.mpirun import LocalLauncher
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.signals import collected
from hpc_rollart.launch.world import RANK_MODULE, Outcome, World

_POLL_S = 0.25
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    with collected(_STOP_SIGNALS) as asked, World(config, run, start, LocalLauncher(), rank_module) as world:
        heard = 0
        while (outcome := world.poll()) is None:
            if len(asked) > heard:
                heard += 1
                world.stop()
            on_poll(world)
            time.sleep(_POLL_S)
    return outcome
