"""The trainer rank: asks for a batch, trains on it, and publishes the next version while it goes on."""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_rollart.config.schema import RunConfig
from hpc_rollart.messages import Batch, BatchItem, Fetch, NextBatch, StepDone, Sync, Trajectories
from hpc_rollart.models.load import load_model, load_tokenizer
from hpc_rollart.rank import RankContext
from hpc_rollart.store.batches import BatchWriter
from hpc_rollart.train.batch import Sample
from hpc_rollart.train.checkpoint import remove_old
from hpc_rollart.train.learner import AlgorithmSettings, Learner, StepResult
from hpc_rollart.weights.mpi_transport import MpiTransport
from hpc_rollart.weights.plan import describe, make_plan
from hpc_rollart.weights.publisher import Publisher

_FETCH_DEADLINE_S = 120.0
_ANSWER_DEADLINE_S = 300.0
_SYNC_DEADLINE_S = 120.0


@dataclass
class TrainerRank:
    """State of the trainer rank.

    Attributes
    ----------
    learner
        The policy and its optimiser.
    publisher
        Sends weight versions to the generators.
    batch_log
        What each step consumed, for auditors.
    steps, saved
        Steps trained so far in all attempts, and those of the newest checkpoint.
    resume
        What the coordinator goes on from after these steps.
    """

    context: RankContext
    learner: Learner
    publisher: Publisher
    batch_log: BatchWriter
    steps: int = 0
    saved: int = -1
    resume: bytes | None = None

    async def run(self) -> None:
        """Train until the last step is done or the coordinator says stop."""
        config = self.context.config
        publishing: asyncio.Task[dict[str, float]] | None = None
        published: dict[str, float] = {}
        try:
            for step in range(self.steps, config.run.steps):
                began = time.monotonic()
                with self.context.timeline.span("wait batch", "wait", step=step):
                    batch = await self._unless_stopped(self._next_batch(step))
                if batch is None:
                    break
                with self.context.timeline.span("fetch", "wait", step=step):
                    samples = await self._fetch(batch)
                waited_s = time.monotonic() - began
                with self.context.timeline.span("train", "train", step=step):
                    # In a thread: the event loop meanwhile drives the broadcast of the version before.
                    result = await asyncio.to_thread(self.learner.step, samples)
                self._log(batch, result)
                self.steps, self.resume = step + 1, batch.resume
                if publishing:
                    published = await publishing
                    publishing = None
                if step + 1 < config.run.steps:
                    with self.context.timeline.span("snapshot", "weights", version=step + 1):
                        await asyncio.to_thread(
                            self.publisher.snapshot, self.learner.state_for_publish(), step + 1
                        )
                    publishing = asyncio.create_task(self._publish(step + 1))
                self._report(step, result, wait_batch_s=waited_s, **published)
                if config.checkpoint.every_steps and (step + 1) % config.checkpoint.every_steps == 0:
                    await self.save()
        finally:
            # The generators take part in a broadcast that has begun; leave none half done.
            if publishing:
                await publishing

    async def _unless_stopped(self, request: Awaitable[Batch]) -> Batch | None:
        """Await the batch, or None once the coordinator says stop."""
        asked = asyncio.ensure_future(request)
        stopped = asyncio.create_task(self.context.stopped.wait())
        try:
            await asyncio.wait({asked, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() and not self.context.stopped.is_set() else None
        finally:
            asked.cancel()
            stopped.cancel()

    async def _next_batch(self, step: int) -> Batch:
        while True:
            # The coordinator ends the run when nothing progresses, and knows what is missing; this deadline
            # is for one that says nothing at all.
            reply = await self.context.mailbox.request(
                self.context.world.coordinator,
                NextBatch(step=step),
                deadline_s=_ANSWER_DEADLINE_S,
                what=f"the batch of step {step}",
            )
            if isinstance(reply, Batch):
                return reply

    async def _fetch(self, batch: Batch) -> list[Sample]:
        """Collect the batch's tokens from the env ranks that hold them; in the batch's order."""
        wanted: dict[int, list[int]] = {}
        for item in batch.items:
            wanted.setdefault(item.env_rank, []).append(item.trajectory)
        replies = await asyncio.gather(
            *(
                self.context.mailbox.request(
                    rank,
                    Fetch(trajectories=trajectories),
                    deadline_s=_FETCH_DEADLINE_S,
                    what=f"{len(trajectories)} trajectories of step {batch.step}",
                )
                for rank, trajectories in wanted.items()
            )
        )
        columns: dict[int, tuple[np.ndarray, ...]] = {}
        for reply in replies:
            assert isinstance(reply, Trajectories)
            cuts = np.cumsum(reply.counts)[:-1]
            split = [np.split(c, cuts) for c in (reply.tokens, reply.logprobs, reply.versions, reply.sampled)]
            columns |= dict(zip(reply.trajectories, zip(*split, strict=True), strict=True))
        return [_sample(item, columns[item.trajectory], self.context.config) for item in batch.items]

    async def _publish(self, version: int) -> dict[str, float]:
        with self.context.timeline.span("broadcast", "weights", version=version):
            timing = await self.publisher.publish()
        return {"publish_s": timing.broadcast_s, "snapshot_s": timing.snapshot_s}

    def _log(self, batch: Batch, result: StepResult) -> None:
        self.batch_log.append(
            step=batch.step,
            version=batch.version,
            trajectories=[item.trajectory for item in batch.items],
            groups=[item.group for item in batch.items],
            staleness=[item.staleness for item in batch.items],
            advantages=result.advantages.tolist(),
        )

    def _report(self, step: int, result: StepResult, **timing: float) -> None:
        metrics: dict[str, Any] = {**result.metrics, **timing}
        self.context.mailbox.send(self.context.world.coordinator, StepDone(step=step, metrics=metrics))

    async def save(self) -> None:
        """Write a checkpoint of the steps trained so far, unless there is one.

        What its steps were trained on and came to is on disk before it is: an attempt that goes on from it
        adds to files that are whole.
        """
        if self.saved == self.steps:
            return
        self.saved = self.steps
        directory = self.context.run_dir / "checkpoints"
        with self.context.timeline.span("checkpoint", "store", step=self.steps):
            await self._sync()
            await asyncio.to_thread(self.learner.save, directory, self.steps, self.resume)
            await asyncio.to_thread(remove_old, directory, self.context.config.checkpoint.keep)

    async def _sync(self) -> None:
        world = self.context.world
        self.batch_log.sync()
        await asyncio.gather(
            *(
                self.context.mailbox.request(
                    rank,
                    Sync(),
                    deadline_s=_SYNC_DEADLINE_S,
                    what=f"its files to be on disk before the checkpoint of step {self.steps}",
                )
                for rank in (world.coordinator, *world.ranks_of("env"))
            )
        )


def _sample(item: BatchItem, columns: tuple[np.ndarray, ...], config: RunConfig) -> Sample:
    tokens, logprobs, versions, sampled = columns
    return Sample(
        trajectory=item.trajectory,
        group=item.group,
        task=item.task,
        reward=item.reward,
        tokens=tokens,
        logprobs=logprobs,
        versions=versions,
        sampled=sampled,
        temperature=config.tasks[item.task].sampling.temperature,
    )


async def main(context: RankContext, model_dir: Path) -> None:
    """Run the trainer rank until its last step is done or the coordinator says stop.

    Parameters
    ----------
    context
        The rank's place in the run.
    model_dir
        The policy to begin with, version `context.step`.
    """
    config, world = context.config, context.world
    assert world.weights_comm is not None
    torch.set_num_threads(config.components[world.component].cpus_per_rank)
    torch.manual_seed(config.run.seed)
    # Master weights are float32 whatever is served; see `train.learner`.
    model = load_model(model_dir, torch.float32)
    learner = Learner(
        model,
        _settings(config),
        publish_dtype=getattr(torch, config.model.dtype),
        tokenizer=load_tokenizer(model_dir),
    )
    if context.checkpoint is not None:
        learner.restore(context.checkpoint)
    publisher = Publisher(
        MpiTransport(world.weights_comm),
        context.mailbox,
        world.ranks_of("generator"),
        make_plan(describe(learner.state_for_publish()), config.weights.bucket_mb << 20),
        config.weights.deadline_s,
    )
    batch_log = BatchWriter(context.run_dir / "batches", run_id=context.run_id, attempt=context.attempt)
    # What an attempt begins from is a checkpoint already, but for the first one of the run.
    rank = TrainerRank(context, learner, publisher, batch_log, steps=context.step, saved=context.step or -1)
    context.hello()
    try:
        await rank.run()
        await context.stopped.wait()
        if context.stop_reason != "failed":
            await rank.save()
    finally:
        batch_log.close()
    await context.bye()


def _settings(config: RunConfig) -> AlgorithmSettings:
    algorithm = config.algorithm
    return AlgorithmSettings(
        learning_rate=algorithm.learning_rate,
        weight_decay=algorithm.weight_decay,
        betas=algorithm.betas,
        max_grad_norm=algorithm.max_grad_norm,
        warmup_steps=algorithm.warmup_steps,
        minibatches=algorithm.minibatches,
        clip_low=algorithm.clip.low,
        clip_high=algorithm.clip.high,
        correction_cap=algorithm.correction.cap,
        normalise_std=algorithm.normalise_std,
        micro_batch_tokens=algorithm.micro_batch_tokens,
    )
