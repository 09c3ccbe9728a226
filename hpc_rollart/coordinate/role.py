"""The coordinator: gives messages and the time to the ledger, and sends out what it decides.

It holds metadata only. Nothing here decides who runs, what is stale or what makes a batch: that is
`core/`, which simulation and property tests drive in the same way.
"""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable
from typing import Any

from hpc_rollart.config.layout import pools
from hpc_rollart.coordinate.life import LifeSigns
from hpc_rollart.coordinate.progress import Progress
from hpc_rollart.coordinate.resume import make_ledger, pack_state, saved_state
from hpc_rollart.core import types as core
from hpc_rollart.core.router import Router
from hpc_rollart.errors import RunFailed
from hpc_rollart.fabric.mailbox import Reply
from hpc_rollart.messages import (
    Admit,
    Alive,
    Batch,
    BatchItem,
    Bye,
    Cancel,
    Cancelled,
    Failed,
    Fatal,
    Finished,
    FreeSlots,
    Hello,
    Installed,
    MayInstall,
    NextBatch,
    NotYet,
    Started,
    StepDone,
    Stop,
    StopAsked,
    Sync,
    Synced,
    Ticket,
)
from hpc_rollart.observe.metrics import MetricsWriter
from hpc_rollart.observe.status import StatusFile
from hpc_rollart.rank import RankContext, record_end, record_failure

_STATUS_EVERY_S = 0.5
_BYE_AFTER_FAILURE_S = 10.0
# A batch may take long while things progress; meanwhile the trainer hears that somebody is there.
_NOT_YET_EVERY_S = 10.0


class Coordinator:
    """State of the coordinator rank.

    Parameters
    ----------
    context
        The rank's place in the run.
    """

    def __init__(self, context: RankContext) -> None:
        config, world = context.config, context.world
        self.context = context
        self.config = config
        self.mailbox = context.mailbox
        saved = saved_state(context)
        self.ledger = make_ledger(context, saved)
        self.router = Router(pools(config), world.generators)
        self.progress = Progress(
            [t.name for t in config.tasks], config.run.steps, time.time(), context.attempt, context.step
        )
        if saved:
            self.progress.restore(saved["progress"])
        self.metrics = MetricsWriter(context.run_dir, context.step)
        self.status = StatusFile(context.run_dir)
        self.free_slots: dict[int, int] = {}
        self.home: dict[int, tuple[int, int]] = {}  # trajectory -> (env rank, task)
        self.installed = dict.fromkeys(world.generators, context.step)
        self.hellos: set[int] = set()
        self.byes: set[int] = set()
        self.life = LifeSigns(config.launch.heartbeat_s)
        self.allowed_version = context.step
        self.waiting_trainer: tuple[int, Reply] | None = None
        self.trainer_asked = 0.0
        self.last_event = time.monotonic()
        self.state = "starting"
        self.failure: tuple[int, str] | None = None
        self.end = asyncio.Event()
        self.end_reason = ""
        self.note = ""  # what a person should know of how the run ended

    # --- messages ----------------------------------------------------------------------------------

    def listen(self) -> None:
        """Register a handler for everything that other ranks tell the coordinator."""
        mailbox = self.mailbox
        mailbox.on(Hello, self.on_hello)
        mailbox.on(Alive, self.on_alive)
        mailbox.on(StopAsked, self.on_stop_asked)
        mailbox.on(FreeSlots, self.on_free_slots)
        mailbox.on(Started, self.on_started)
        mailbox.on(Finished, self.on_finished)
        mailbox.on(Failed, self.on_failed)
        mailbox.on(Cancelled, self.on_cancelled)
        mailbox.on(Installed, self.on_installed)
        mailbox.on_request(NextBatch, self.on_next_batch)
        mailbox.on(StepDone, self.on_step_done)
        mailbox.on_request(Sync, self.on_sync)
        mailbox.on(Bye, self.on_bye)
        mailbox.on(Fatal, self.on_fatal)
        mailbox.on_lost(self.on_lost)

    def on_hello(self, source: int, _message: Hello) -> None:
        """A rank is ready."""
        self.hellos.add(source)
        self.life.heard(source)

    def on_alive(self, source: int, _message: Alive) -> None:
        """A rank's event loop turns."""
        self.life.heard(source)

    def on_stop_asked(self, source: int, _message: StopAsked) -> None:
        """A signal to stop came to some rank, or to all: one end for all of them."""
        if not self.end.is_set():
            print(f"asked to stop by a signal to {self.context.world.name_of(source)}")
        self.finish("interrupted")

    def on_free_slots(self, source: int, message: FreeSlots) -> None:
        """An env rank has room."""
        self.free_slots[source] = self.free_slots.get(source, 0) + message.count
        self.pump()

    def on_started(self, _source: int, message: Started) -> None:
        """First tokens were sampled: the staleness of these trajectories is known from here on."""
        self.last_event = time.monotonic()
        for trajectory in message.trajectories:
            self._cancel(self.ledger.started(trajectory, message.version))

    def on_finished(self, _source: int, message: Finished) -> None:
        """An episode was scored."""
        self.last_event = time.monotonic()
        _, task = self.home[message.trajectory]
        self.progress.finished(task, message)
        self.router.release(message.trajectory)
        self._cancel(self.ledger.finished(message.trajectory, message.reward, message.start_version))
        self.pump()

    def on_failed(self, source: int, message: Failed) -> None:
        """An episode failed; the ledger replaces the member.

        That is no sign of life: a run whose environments only fail has stalled.
        """
        if message.status == "lost":
            return  # a rank was lost, and on that account the run ends
        _, task = self.home.pop(message.trajectory)
        self.progress.failed(task)
        self.router.release(message.trajectory)
        name = self.config.tasks[task].name
        print(f"{name}: trajectory {message.trajectory} on rank {source}: {message.status}: {message.reason}")
        self._cancel(self.ledger.failed(message.trajectory, message.status, message.reason, time.monotonic()))
        self.pump()

    def on_cancelled(self, _source: int, message: Cancelled) -> None:
        """Env ranks confirm what was cancelled; its rows are written."""
        for trajectory in message.trajectories:
            self.router.release(trajectory)
            self.home.pop(trajectory, None)
            self.progress.dropped(trajectory)
        self.pump()

    def on_installed(self, source: int, message: Installed) -> None:
        """A generator serves a new version; the window moves when the last one does."""
        self.last_event = time.monotonic()
        self.progress.weights_installed(source, message)
        self.installed[source] = message.version
        self.ledger.installed(min(self.installed.values()))
        self.pump()

    def on_next_batch(self, _source: int, message: NextBatch, reply: Reply) -> None:
        """The trainer wants a batch; it is answered as soon as there is one."""
        self.waiting_trainer = (message.step, reply)
        self.trainer_asked = time.monotonic()
        self.pump()

    def on_step_done(self, _source: int, message: StepDone) -> None:
        """A step is trained: its line goes into metrics.jsonl."""
        self.last_event = time.monotonic()
        self.metrics.write(self.progress.step_done(message, self.ledger.counts()))
        if message.metrics.get("all_advantages_zero"):
            print(f"step {message.step}: every group's rewards are equal, so there was nothing to learn from")
        if message.step + 1 == self.config.run.steps:
            self.finish("done")

    def on_sync(self, _source: int, _message: Sync, reply: Reply) -> None:
        """A checkpoint is to follow: the lines of its steps, which were reported before, go to disk."""
        self.metrics.sync()
        reply(Synced())

    def on_bye(self, source: int, _message: Bye) -> None:
        """A rank has flushed all it holds."""
        self.byes.add(source)
        self.life.forget(source)

    def on_fatal(self, source: int, message: Fatal) -> None:
        """A rank cannot go on."""
        self.fail(source, message.error)

    def on_lost(self, rank: int) -> None:
        """A rank died."""
        self.fail(rank, "the process died (killed, or out of memory?)")

    # --- decisions ---------------------------------------------------------------------------------

    def pump(self) -> None:
        """Do everything that the present state allows: answer the trainer, admit new trajectories."""
        if self.state != "running":
            return
        now = time.monotonic()
        self._answer_trainer(now)
        self._admit(now)
        if self.config.schedule.mode == "one_off":
            self._allow_install()

    def _answer_trainer(self, now: float) -> None:
        if self.waiting_trainer is None:
            return
        step, reply = self.waiting_trainer
        cut = self.ledger.cut_batch(now)
        if cut is None:
            self._say_not_yet(now)
            return
        batch, cancels = cut
        assert step == batch.step
        self.waiting_trainer = None
        items = [
            BatchItem(
                trajectory=item.trajectory,
                group=item.group,
                task=item.task,
                env_rank=self.home.pop(item.trajectory)[0],
                reward=item.reward,
                start_version=item.start_version,
                staleness=item.staleness,
            )
            for item in batch.items
        ]
        resume = pack_state(self.ledger, self.progress, {item.trajectory for item in items})
        message = Batch(step=batch.step, version=batch.version, items=items, resume=resume)
        self.progress.batch_cut(message)
        reply(message)
        self._cancel(cancels)

    def _say_not_yet(self, now: float) -> None:
        """Tell a trainer that has waited for a while that there is no batch yet; it asks again."""
        if self.waiting_trainer is not None and now > self.trainer_asked + _NOT_YET_EVERY_S:
            _, reply = self.waiting_trainer
            self.waiting_trainer = None
            reply(NotYet())

    def _admit(self, now: float) -> None:
        """Send each new ticket to the env rank with the most room; the router picks its replica."""
        tickets: dict[int, list[Ticket]] = {}
        t_admitted = time.time()
        for leave in self.ledger.admit(now, sum(self.free_slots.values())):
            rank = max(self.free_slots, key=lambda r: (self.free_slots[r], -r))
            self.free_slots[rank] -= 1
            self.home[leave.trajectory] = (rank, leave.task)
            route = self.router.route(leave.trajectory, self.config.tasks[leave.task].affinity)
            tickets.setdefault(rank, []).append(
                Ticket(
                    trajectory=leave.trajectory,
                    group=leave.group,
                    member=leave.member,
                    attempt=leave.attempt,
                    task=leave.task,
                    env_seed=leave.env_seed,
                    sample_seed=leave.sample_seed,
                    pool=route.pool,
                    generator=route.replica,
                    t_admitted=t_admitted,
                )
            )
        for rank, batch in tickets.items():
            self.mailbox.send(rank, Admit(tickets=batch))

    def _cancel(self, cancels: Iterable[core.Cancel]) -> None:
        """Tell the env ranks; they free the engine's slots themselves."""
        messages: dict[tuple[int, str], list[int]] = {}
        for cancel in cancels:
            rank, _ = self.home[cancel.trajectory]
            messages.setdefault((rank, cancel.status), []).append(cancel.trajectory)
        for (rank, status), trajectories in messages.items():
            self.mailbox.send(rank, Cancel(trajectories=trajectories, status=status))

    def _allow_install(self) -> None:
        """In `one_off` mode, let the generators take the next version once they have drained."""
        version = self.ledger.version + 1
        if (
            version > self.allowed_version
            and version <= self.ledger.step
            and self.ledger.may_install(version)
        ):
            self.allowed_version = version
            for rank in self.installed:
                self.mailbox.send(rank, MayInstall(version=version))

    # --- the run's beginning and end -----------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """End the run in good order: `done` or `interrupted`."""
        if not self.end.is_set():
            self.end_reason = reason
            self.end.set()

    def fail(self, rank: int, error: str) -> None:
        """End the run because of what happened on `rank`."""
        if self.failure is None:
            self.failure = (rank, error)
        self.end_reason = "failed"
        self.end.set()

    async def run(self) -> None:
        """Coordinate until the run ends.

        Raises
        ------
        RunFailed
            A rank failed or was lost, or nothing progressed for `launch.stall_deadline_s`.
        """
        await self._gather_ranks()
        if not self.end.is_set():
            self.state = "running"
            self.progress.begin(time.time())
            self.last_event = time.monotonic()
            if self.ledger.done:  # the attempt before was killed between its last checkpoint and its end
                self.finish("done")
            await self._watch()
        await self._wind_up()
        if self.failure:
            rank, error = self.failure
            raise RunFailed(f"rank {rank} ({self.context.world.name_of(rank)}): {error}")

    async def _gather_ranks(self) -> None:
        """Wait until every rank has said that it is ready."""
        world = self.context.world
        expected = set(range(world.size)) - {world.rank}
        deadline = time.monotonic() + self.config.launch.start_deadline_s
        while not self.end.is_set() and (missing := expected - self.hellos):
            names = ", ".join(world.name_of(rank) for rank in sorted(missing))
            self._write_status(f"waiting for {names}")
            self._say_not_yet(time.monotonic())  # the trainer may have been ready long before the others
            if time.monotonic() > deadline:
                seconds = self.config.launch.start_deadline_s
                self.fail(
                    min(missing), f"not ready after launch.start_deadline_s = {seconds:g} s; missing: {names}"
                )
            self._fail_the_silent()
            await self._pause(0.1)

    async def _watch(self) -> None:
        """Keep the status file fresh, wake the ledger when something falls due, and notice a stall."""
        budget = self.config.run.time_budget
        self.pump()
        while not self.end.is_set():
            now = time.monotonic()
            wakeup = self.ledger.next_wakeup(now)
            await self._pause(min(_STATUS_EVERY_S, max(0.01, (wakeup or now + 1.0) - now)))
            limit_s = self.config.launch.stall_deadline_s
            if time.monotonic() - self.last_event > limit_s:
                waiting = self.ledger.waiting_for(time.monotonic())
                self.fail(
                    self.context.world.rank,
                    f"nothing progressed for {limit_s:g} s (launch.stall_deadline_s): {waiting}",
                )
            elif budget and self.progress.elapsed_s > budget:
                steps = f"{self.progress.step} of {self.config.run.steps} steps"
                self.note = f"run.time_budget was used up after {steps}"
                self.finish("done")
            else:
                self.pump()
            self._fail_the_silent()
            self._write_status()

    def _fail_the_silent(self) -> bool:
        """Fail the run if a rank that should be at work gives no sign of life; returns whether one does."""
        silent = self.life.silent(time.monotonic()) - self.mailbox.lost
        if silent:
            limit_s = self.config.launch.heartbeat_s
            self.fail(
                min(silent),
                f"no sign of life for {limit_s:g} s (launch.heartbeat_s): the node may be down or cut off",
            )
        return bool(silent)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.end.wait(), seconds)

    async def _wind_up(self) -> None:
        """Stop the trainer, then env ranks, then generators.

        For its last checkpoint the trainer needs what the env ranks hold on disk, and a last broadcast may
        still need the generators.
        """
        world = self.context.world
        self.state = "stopping"
        self._write_status(f"stopping: {self.end_reason}")
        if self.failure:
            record_failure(self.context, *self.failure)
        self.ledger.shutdown()
        seconds = _BYE_AFTER_FAILURE_S if self.failure else self.config.stop_deadline_s
        deadline = time.monotonic() + seconds
        trainers, envs = set(world.ranks_of("trainer")), set(world.ranks_of("env"))
        order = [trainers | envs] if self.failure else [trainers, envs]
        for ranks in (*order, set(world.generators)):
            for rank in ranks:
                self.mailbox.send(rank, Stop(reason=self.end_reason))
            await self._byes(ranks, deadline)
        self.metrics.close()
        self.state = self.end_reason
        record_end(self.context, self.state, self.progress.step, self.ledger.dispatched)
        self._write_status(self.note)

    async def _byes(self, ranks: set[int], deadline: float) -> None:
        """Wait until `ranks` have flushed; a rank that does not answer is named and left behind."""
        told = time.monotonic()
        while missing := ranks - self.byes - self.mailbox.lost:
            if self.failure:
                missing.discard(self.failure[0])
                if not missing:
                    return
            names = ", ".join(self.context.world.name_of(rank) for rank in sorted(missing))
            if time.monotonic() > deadline:
                self.fail(min(missing), f"did not stop in time (waited for {names})")
                record_failure(self.context, min(missing), f"did not stop in time (waited for {names})")
                return
            if not self.failure and self._fail_the_silent():
                assert self.failure
                record_failure(self.context, *self.failure)
                return
            if time.monotonic() - told > _STATUS_EVERY_S:
                told = time.monotonic()
                self._write_status(f"stopping: waiting for {names}")
            await asyncio.sleep(0.02)

    def _write_status(self, message: str = "") -> None:
        view = self.ledger.snapshot()
        groups = {"open": view.open, "complete": view.complete}
        self.status.write(self.progress.status(self.state, message, view.in_flight, groups))


def main(context: RankContext) -> Coroutine[Any, Any, None]:
    """Coordinate the run until it ends; listens to the other ranks from the call on."""
    coordinator = Coordinator(context)
    coordinator.listen()
    return coordinator.run()
