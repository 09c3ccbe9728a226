"""The env rank: runs episodes, keeps finished trajectories until the trainer takes them, writes the shard."""

import asyncio
import math
import time
from asyncio import FIRST_COMPLETED
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_rollart.config.layout import pools
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import RunFailed
from hpc_rollart.fabric.errors import RankLost
from hpc_rollart.fabric.mailbox import Reply
from hpc_rollart.messages import (
    Admit,
    Cancel,
    Cancelled,
    EndRequest,
    Failed,
    FailedAs,
    Fetch,
    Finished,
    FreeSlots,
    Generate,
    Generated,
    Message,
    Sampling,
    Sync,
    Synced,
    Ticket,
    Trajectories,
)
from hpc_rollart.models.chat import ChatTokenizer
from hpc_rollart.rank import RankContext
from hpc_rollart.reward.inline import RewardFailure, episode_return
from hpc_rollart.rollout.episode import Episode, EpisodeRules, play
from hpc_rollart.rollout.workers import EnvFailure, WorkerPool
from hpc_rollart.store.writer import ShardWriter, TrajectoryRecord, TurnRecord

# Long enough for the longest answer on a loaded machine; a generator that is gone is noticed at once
# by the fabric, so this only catches one that lives and does not answer.
_GENERATE_DEADLINE_S = 600.0
# Cancelled episodes only have to write a row; a worker that hangs is killed, never waited for.
_FINISH_S = 10.0
_FLUSH_CHECK_S = 0.25


@dataclass
class _Running:
    """A ticket being played, and the status it will get if it is cancelled."""

    task: "asyncio.Task[None]"
    cancelled_as: str = ""
    begun: bool = False

    def cancel(self, status: str) -> None:
        """End the episode with that status.

        A task that never ran is not cancelled, for it would leave no row: it ends itself as it begins.
        """
        self.cancelled_as = self.cancelled_as or status
        if self.begun:
            self.task.cancel()


class EnvRank:
    """State of one env rank.

    Parameters
    ----------
    context
        The rank's place in the run.
    chat
        Tokeniser of turns, of the policy being trained.
    workers
        Worker processes for the environments, one a slot.
    shard
        Where trajectories are written.
    """

    def __init__(
        self, context: RankContext, chat: ChatTokenizer, workers: WorkerPool, shard: ShardWriter
    ) -> None:
        self.context = context
        self.mailbox = context.mailbox
        self.chat = chat
        self.workers = workers
        self.shard = shard
        self.rules = [_rules(context.config, index) for index in range(len(context.config.tasks))]
        self.running: dict[int, _Running] = {}
        # Finished, scored and written, waiting for the trainer or for the coordinator's word to drop them.
        self.held: dict[int, Episode] = {}
        # Set when an episode ended in a way that is neither its environment's fault nor a cancel: a fault
        # of this rank, which must not go on as if nothing had happened.
        self.crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- messages ----------------------------------------------------------------------------------

    def on_admit(self, _source: int, message: Admit) -> None:
        """Start an episode for each ticket."""
        for ticket in message.tickets:
            task = asyncio.create_task(self._run(ticket), name=f"trajectory {ticket.trajectory}")
            task.add_done_callback(self._note_crash)
            self.running[ticket.trajectory] = _Running(task)

    def on_cancel(self, _source: int, message: Cancel) -> None:
        """End running episodes at once; drop finished ones, and correct the status of their rows."""
        dropped = []
        for trajectory in message.trajectories:
            if running := self.running.get(trajectory):
                running.cancel(message.status)
            else:
                # It ended while the cancel was under way; the ledger's word is final, the row follows it.
                self.shard.set_status(trajectory, message.status)
                if self.held.pop(trajectory, None):
                    dropped.append(trajectory)
        if dropped:
            self.mailbox.send(self.context.world.coordinator, Cancelled(trajectories=dropped))

    def on_fetch(self, _source: int, message: Fetch, reply: Reply) -> None:
        """Hand trajectories to the trainer and let go of them."""
        episodes = [self.held.pop(trajectory) for trajectory in message.trajectories]
        reply(
            Trajectories(
                trajectories=message.trajectories,
                counts=np.array([len(e.tokens) for e in episodes], dtype=np.int64),
                tokens=_concatenate([e.tokens for e in episodes], np.int32),
                logprobs=_concatenate([e.logprobs for e in episodes], np.float32),
                versions=_concatenate([e.versions for e in episodes], np.int32),
                sampled=_concatenate([e.sampled for e in episodes], np.uint8),
            )
        )

    def on_sync(self, _source: int, _message: Sync, reply: Reply) -> None:
        """A checkpoint is to follow: the rows of what was trained on go to disk."""
        self.shard.sync()
        reply(Synced())

    # --- one episode -------------------------------------------------------------------------------

    async def _run(self, ticket: Ticket) -> None:
        """Play one ticket; every way it can end leaves one row and one message to the coordinator."""
        episode = Episode(ticket, t_started=time.time())
        task = self.context.config.tasks[ticket.task]
        report: Message
        running = self.running[ticket.trajectory]
        running.begun = True
        try:
            if running.cancelled_as:
                raise asyncio.CancelledError
            async with self.workers.lease(task.env, task.args) as environment:
                await play(
                    episode,
                    self.rules[ticket.task],
                    environment,
                    self.chat,
                    lambda turn: self._generate(ticket, turn),
                    self.chat.eos_ids,
                )
            episode.t_finished = time.time()
            reward = episode_return(episode.rewards)
            episode.t_scored = time.time()
        except asyncio.CancelledError:
            if not (status := running.cancelled_as):
                raise
            episode.stop = {"done": "run_ended", "": "cancelled"}.get(self.context.stop_reason, "interrupted")
            self._write(episode, status)
            report = Cancelled(trajectories=[ticket.trajectory])
        except EnvFailure as failure:
            report = self._failed(episode, "env_failed", failure.stop, failure.reason)
        except RewardFailure as failure:
            report = self._failed(episode, "reward_failed", "score_error", str(failure))
        except RankLost as lost:
            # The coordinator notices the loss as well, and decides what becomes of the run.
            report = self._failed(episode, "lost", "rank_lost", str(lost))
        else:
            self._write(episode, "ok", reward)
            self.held[ticket.trajectory] = episode
            report = _finished(episode, reward)
        finally:
            del self.running[ticket.trajectory]
            self.mailbox.send(ticket.generator, EndRequest(trajectory=ticket.trajectory))
        self.mailbox.send(self.context.world.coordinator, report)
        self.mailbox.send(self.context.world.coordinator, FreeSlots(count=1))

    def _note_crash(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if error and not self.crash.done():
            self.crash.set_exception(error)

    async def _generate(self, ticket: Ticket, turn: Generate) -> Generated:
        reply = await self.mailbox.request(
            ticket.generator,
            turn,
            deadline_s=_GENERATE_DEADLINE_S,
            what=f"turn {turn.turn} of trajectory {ticket.trajectory}",
        )
        assert isinstance(reply, Generated)
        return reply

    def _failed(self, episode: Episode, status: FailedAs, stop: str, reason: str) -> Failed:
        episode.stop = stop
        episode.info = {**episode.info, "reason": reason}
        self._write(episode, status)
        return Failed(trajectory=episode.ticket.trajectory, status=status, reason=reason)

    def _write(self, episode: Episode, status: str, reward: float = math.nan) -> None:
        """Append the trajectory's one row."""
        ticket, now = episode.ticket, time.time()
        self.shard.append(
            TrajectoryRecord(
                trajectory=ticket.trajectory,
                group=ticket.group,
                task=ticket.task,
                status=status,
                stop=episode.stop,
                seed=ticket.env_seed,
                start_version=episode.start_version,
                end_version=episode.end_version,
                reward=reward,
                pool=ticket.pool,
                generator=ticket.generator,
                t_admitted=ticket.t_admitted,
                t_started=episode.t_started,
                t_finished=episode.t_finished or now,
                t_scored=episode.t_scored or math.nan,
                tokens=np.asarray(episode.tokens, np.int32),
                logprobs=np.asarray(episode.logprobs, np.float32),
                versions=np.asarray(episode.versions, np.int32),
                sampled=np.asarray(episode.sampled, np.uint8),
                turns=[
                    TurnRecord(t.context_count, t.sampled_count, t.reward, t.t_generate, t.t_step)
                    for t in episode.turns
                ],
                messages=episode.messages,
                info=episode.info,
            )
        )
        self.context.timeline.event(
            "episode",
            "env",
            episode.t_started,
            now - episode.t_started,
            trajectory=ticket.trajectory,
            task=self.context.config.tasks[ticket.task].name,
            status=status,
        )

    # --- the end -----------------------------------------------------------------------------------

    async def finish(self) -> None:
        """End what still runs and drop what nobody will train on, all as `surplus`."""
        for trajectory in self.held:
            self.shard.set_status(trajectory, "surplus")
        self.held.clear()
        for running in self.running.values():
            running.cancel("surplus")
        if tasks := [running.task for running in self.running.values()]:
            _, pending = await asyncio.wait(tasks, timeout=_FINISH_S)
            if pending:
                names = ", ".join(task.get_name() for task in pending)
                raise RunFailed(f"did not end within {_FINISH_S:g} s: {names}")
        if self.crash.done():
            self.crash.result()


def _rules(config: RunConfig, index: int) -> EpisodeRules:
    task = config.tasks[index]
    sampling = task.sampling
    return EpisodeRules(
        max_turns=task.max_turns,
        max_context=config.model.max_context,
        reset_s=task.timeouts.reset_s,
        step_s=task.timeouts.step_s,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        ),
    )


def _finished(episode: Episode, reward: float) -> Finished:
    return Finished(
        trajectory=episode.ticket.trajectory,
        reward=reward,
        turns=len(episode.turns),
        sampled=sum(episode.sampled),
        start_version=episode.start_version,
    )


def _concatenate(columns: list[list[Any]], dtype: Any) -> np.ndarray:
    return np.concatenate([np.asarray(column, dtype) for column in columns])


async def main(context: RankContext, model_dir: Path) -> None:
    """Run an env rank until the coordinator says stop.

    Parameters
    ----------
    context
        The rank's place in the run.
    model_dir
        The policy's directory, or a checkpoint of it; only its tokenizer is read.
    """
    config, world = context.config, context.world
    part = config.components[world.component]
    assert part.role == "env"
    shard = ShardWriter(
        context.run_dir / "trajectories",
        component=world.component,
        rank=world.rank,
        run_id=context.run_id,
        host=world.host,
        attempt=context.attempt,
        tasks=[task.name for task in config.tasks],
        pools=pools(config),
        filter=config.store.filter,
        rotate_mb=config.store.rotate_mb,
        flush_every_s=config.store.flush_every_s,
    )
    workers = WorkerPool(part.slots)
    try:
        await workers.start()
        rank = EnvRank(context, ChatTokenizer(model_dir), workers, shard)
        context.mailbox.on(Admit, rank.on_admit)
        context.mailbox.on(Cancel, rank.on_cancel)
        context.mailbox.on_request(Fetch, rank.on_fetch)
        context.mailbox.on_request(Sync, rank.on_sync)
        context.hello()
        context.mailbox.send(world.coordinator, FreeSlots(count=part.slots))
        stopped = asyncio.create_task(context.stopped.wait(), name="stop")
        ends: set[asyncio.Future[Any]] = {stopped, rank.crash}
        while not stopped.done():
            await asyncio.wait(ends, timeout=_FLUSH_CHECK_S, return_when=FIRST_COMPLETED)
            if rank.crash.done():
                rank.crash.result()
            shard.maybe_flush(time.monotonic())
        await rank.finish()
    finally:
        try:
            shard.close()
        finally:
            await workers.close(deadline_s=5.0)
    await context.bye()
