"""What one MPI rank runs: opens the world, plays its role, and leaves without taking others down.

Started by the launcher as ``python -m hpc_rollart.launch.rank RUN_DIR ATTEMPT``; not for people.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_rollart.config.layout import blocks, pool_of
from hpc_rollart.config.load import load_resolved
from hpc_rollart.errors import RunFailed, UserError
from hpc_rollart.fabric.errors import FabricError
from hpc_rollart.fabric.mailbox import Mailbox
from hpc_rollart.fabric.world import ComponentSpec, open_world
from hpc_rollart.launch.attempt import Attempt, logs
from hpc_rollart.launch.gpus import GPU_VENDOR, show_own_gpus
from hpc_rollart.launch.processes import end_with_parent
from hpc_rollart.launch.rundir import read_manifest
from hpc_rollart.messages import AnyMessage, Fatal, Stop
from hpc_rollart.observe.timeline import Timeline
from hpc_rollart.rank import RankContext, record_failure

# A rank that failed waits this long for the coordinator's `Stop`, so that the others end in good order.
_STOP_WAIT_S = 20.0
# Slurm sends these to every process of a job step: at `scancel`, before the time limit, at preemption.
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class StopSignals:
    """Takes the signals that ask to stop, from the rank's beginning to its end, and dies of none.

    They may come to any rank, or to all of them; what they ask for is up to the coordinator.
    """

    def __init__(self) -> None:
        self._asked = False
        self._act: Callable[[], object] | None = None
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note)
        # Ctrl-C is the launcher's to handle. What starts ranks may have blocked these signals for itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*_STOP_SIGNALS, signal.SIGHUP, signal.SIGINT})

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        if self._act:
            self._act()

    @contextlib.contextmanager
    def lead_to(self, act: Callable[[], object]) -> Iterator[None]:
        """Within the body call `act` at every signal, and at once if there was one before."""
        self._act = act
        if self._asked:
            act()
        try:
            yield
        finally:
            self._act = None


def main(argv: list[str]) -> int:
    """Run one rank and return its exit status."""
    run_dir = Path(argv[0])
    attempt = Attempt.read(run_dir, int(argv[1]))
    # A rank must not outlive the launcher that would end it.
    end_with_parent(signal.SIGKILL)
    signals = StopSignals()
    config = attempt.effective(load_resolved(run_dir))
    manifest = read_manifest(run_dir)
    world = open_world(
        [
            ComponentSpec(
                b.component, b.role, b.count, pool_of(config, b.first) if b.role == "generator" else -1
            )
            for b in blocks(config)
        ]
    )
    _redirect_output(logs(run_dir, attempt.number) / f"{world.component}-{world.rank}.log")
    with Timeline(run_dir / "timeline", world.component, world.rank) as timeline:
        timeline.event("attempt", "wait", time.time(), 0.0, attempt=attempt.number)
        checkpoint = Path(attempt.checkpoint) if attempt.checkpoint else None
        context = RankContext(
            config=config,
            run_dir=run_dir,
            run_id=manifest["run_id"],
            attempt=attempt.number,
            world=world,
            mailbox=Mailbox(world.comm, AnyMessage, world.name_of),
            timeline=timeline,
            step=attempt.step,
            checkpoint=checkpoint,
        )
        # A checkpoint is a whole model folder, tokenizer included.
        failed = asyncio.run(_live(context, checkpoint or Path(manifest["model_dir"]), signals))
    whole = not failed and context.stop_reason != "failed" and not context.mailbox.lost
    world.close(graceful=whole, code=3 if failed else 0)
    return 0


async def _play(context: RankContext, model_dir: Path) -> None:
    """Play this rank's role, seeing its own GPUs only."""
    world, config = context.world, context.config
    print(f"{world.me.name}: process {os.getpid()}, attempt {context.attempt}")
    if vendor := os.environ.get(GPU_VENDOR):  # in a Slurm job
        block = next(block for block in blocks(config) if world.rank in block.ranks)
        part = config.components[world.component]
        seen = show_own_gpus(os.environ, part, block, world.rank, vendor)
        print(f"sees GPUs {', '.join(seen) or 'none'}")
    await _role(context, model_dir)


def _role(context: RankContext, model_dir: Path) -> Coroutine[Any, Any, None]:
    """Import and start the role's main loop: a rank loads only the libraries it needs."""
    if context.world.is_coordinator:
        from hpc_rollart.coordinate.role import main as coordinator

        return coordinator(context)
    if context.world.role == "trainer":
        from hpc_rollart.train.role import main as trainer

        return trainer(context, model_dir)
    if context.world.role == "generator":
        from hpc_rollart.generate.role import main as generator

        return generator(context, model_dir)
    from hpc_rollart.rollout.role import main as env

    return env(context, model_dir)


async def _live(context: RankContext, model_dir: Path, signals: StopSignals) -> bool:
    """Play the role to its end; returns whether this rank failed."""
    mailbox, world = context.mailbox, context.world
    mailbox.on(Stop, context.on_stop)
    coordinator_lost = asyncio.Event()
    if not world.is_coordinator:
        mailbox.on_lost(lambda rank: coordinator_lost.set() if rank == world.coordinator else None)
    loop = asyncio.get_running_loop()
    # The role first: the coordinator's handlers must be there before its mailbox takes anything.
    playing = asyncio.create_task(_play(context, model_dir), name="role")
    moving: asyncio.Task[Any] = asyncio.create_task(mailbox.run(), name="mailbox")
    watching = asyncio.create_task(coordinator_lost.wait(), name="coordinator lost")
    ends: set[asyncio.Task[Any]] = {playing, moving, watching}
    tasks = set(ends)
    if not world.is_coordinator:
        tasks.add(asyncio.create_task(context.show_life(), name="signs of life"))
    try:
        with signals.lead_to(lambda: loop.call_soon_threadsafe(context.ask_to_stop)):
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if coordinator_lost.is_set():
            raise RunFailed("the coordinator was lost")
        await (playing if playing.done() else moving)
    except Exception as error:
        await _fail(context, error)
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_STOP_WAIT_S)
    return False


async def _fail(context: RankContext, error: Exception) -> None:
    """Put the failure on record, tell the coordinator, and wait for its word to leave."""
    world = context.world
    text = str(error) or type(error).__name__
    if isinstance(error, RunFailed | FabricError | UserError):
        print(text)  # says all there is to say
    else:
        traceback.print_exc()
    lost = context.mailbox.lost - {world.rank}
    if lost:  # what failed here is a consequence
        record_failure(context, min(lost), "the process died (killed, or out of memory?)")
    record_failure(context, world.rank, text)
    if world.is_coordinator or world.coordinator in context.mailbox.lost:
        return
    context.mailbox.send(world.coordinator, Fatal(error=text))
    deadline = asyncio.get_running_loop().time() + _STOP_WAIT_S
    while not context.stopped.is_set() and asyncio.get_running_loop().time() < deadline:
        try:
            context.mailbox.poll()
        except Exception:
            return  # the mailbox itself is what failed: nobody can be waited for
        await asyncio.sleep(0.01)


def _redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, C libraries' included, to its own log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
