"""The generator rank: steps the engine, answers requests, and takes new weights between two steps."""

import asyncio
import contextlib
import time
from pathlib import Path

import torch

from hpc_rollart.fabric.mailbox import Reply
from hpc_rollart.generate.engine import Completion, Engine, Request
from hpc_rollart.generate.transformers_engine import TransformersEngine
from hpc_rollart.messages import EndRequest, Generate, Generated, Installed, MayInstall, Started
from hpc_rollart.models.chat import ChatTokenizer
from hpc_rollart.models.load import load_model
from hpc_rollart.models.tensors import published_tensors
from hpc_rollart.observe.timeline import Coalescer
from hpc_rollart.rank import RankContext
from hpc_rollart.weights.mpi_transport import MpiTransport
from hpc_rollart.weights.plan import describe, make_plan
from hpc_rollart.weights.subscriber import Subscriber

# With nothing to decode the loop sleeps until a message wakes it, and looks at arriving weights this often.
_IDLE_S = 0.02
_ARRIVING_S = 0.001


class GeneratorRank:
    """State of one generator rank.

    Parameters
    ----------
    context
        The rank's place in the run.
    engine
        The inference engine; this rank is its only user.
    subscriber
        Receives the weights that the trainer publishes.
    wait_for_leave
        Install a version only when the coordinator allows it (`one_off`: when the pool has drained).
    """

    def __init__(
        self, context: RankContext, engine: Engine, subscriber: Subscriber, *, wait_for_leave: bool
    ) -> None:
        self.context = context
        self.mailbox = context.mailbox
        self.engine = engine
        self.subscriber = subscriber
        self.allowed = -1 if wait_for_leave else None
        self.replies: dict[int, Reply] = {}
        self.busy = Coalescer(context.timeline, "generate", "generate")
        self._wake = asyncio.Event()

    # --- messages ----------------------------------------------------------------------------------

    def on_generate(self, _source: int, message: Generate, reply: Reply) -> None:
        """Queue one turn; the reply is sent when it has been sampled."""
        self.replies[message.trajectory] = reply
        self.engine.add(
            Request(
                trajectory=message.trajectory,
                turn=message.turn,
                tokens=message.tokens,
                sampling=message.sampling,
                seed=message.seed,
            )
        )
        self._wake.set()

    def on_end(self, _source: int, message: EndRequest) -> None:
        """Free what the trajectory holds here; a turn still being sampled ends unanswered."""
        self.replies.pop(message.trajectory, None)
        self.engine.abort(message.trajectory)

    def on_may_install(self, _source: int, message: MayInstall) -> None:
        """Note the coordinator's leave."""
        self.allowed = message.version
        self._wake.set()

    # --- the loop ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Step the engine until the coordinator says stop."""
        while not self.context.stopped.is_set():
            self.subscriber.poll()
            self._install_if_ready()
            if self.engine.has_work():
                self._step()
                self.mailbox.poll()
                await asyncio.sleep(0)
            else:
                await self._idle()

    def _step(self) -> None:
        began = time.time()
        result = self.engine.step()
        self.busy.busy(began, time.time())
        by_version: dict[int, list[int]] = {}
        for trajectory, version in result.first_tokens:
            by_version.setdefault(version, []).append(trajectory)
        for version, trajectories in by_version.items():
            self.mailbox.send(
                self.context.world.coordinator, Started(trajectories=trajectories, version=version)
            )
        for completion in result.completions:
            self.replies.pop(completion.trajectory)(_generated(completion))

    async def _idle(self) -> None:
        self.busy.flush()
        self._wake.clear()
        timeout = _ARRIVING_S if self.subscriber.receiving else _IDLE_S
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout)

    def _install_if_ready(self) -> None:
        """Suspend, install, resume: no request enters and none is stepped while the weights change.

        The paper's protocol (section 5): what has *already arrived* is installed, so the pause is a local
        copy; the KV of interrupted requests is then rebuilt under the new weights.
        """
        ready = self.subscriber.ready()
        if ready is None:
            return
        version, tensors = ready
        if self.allowed is not None and self.allowed < version:
            return
        timeline = self.context.timeline
        suspended = time.time()
        with timeline.span("install", "weights", version=version):
            self.engine.install(tensors, version)
        exposed_s = time.time() - suspended
        self.subscriber.installed()
        if self.context.config.weights.kv_after_update == "recompute":
            # The next steps rebuild the KV, among other requests' work; this only says that they must.
            self.engine.recompute()
        self.mailbox.send(
            self.context.world.coordinator,
            Installed(version=version, exposed_s=exposed_s),
        )


def _generated(completion: Completion) -> Generated:
    return Generated(
        trajectory=completion.trajectory,
        tokens=completion.tokens,
        logprobs=completion.logprobs,
        versions=completion.versions,
        stop=completion.stop,
        seconds=completion.seconds,
    )


async def main(context: RankContext, model_dir: Path) -> None:
    """Run a generator rank until the coordinator says stop.

    Parameters
    ----------
    context
        The rank's place in the run.
    model_dir
        The policy to begin with, version `context.step`.
    """
    config, world = context.config, context.world
    part = config.components[world.component]
    assert part.role == "generator" and world.weights_comm is not None
    torch.set_num_threads(part.cpus_per_rank)
    model = load_model(model_dir, getattr(torch, config.model.dtype))
    engine = TransformersEngine(
        model,
        # The env ranks end turns by the same rule: a template may end them with another token than the
        # tokenizer's own.
        eos_ids=ChatTokenizer(model_dir).eos_ids,
        max_context=config.model.max_context,
        max_requests=part.engine.max_requests,
        prefill_tokens=part.engine.prefill_tokens,
        deterministic=part.engine.deterministic,
    )
    if context.step:
        engine.install(published_tensors(model), context.step)  # the weights it has, by their version
    subscriber = Subscriber(
        MpiTransport(world.weights_comm),
        context.mailbox,
        world.trainer,
        make_plan(describe(published_tensors(model)), config.weights.bucket_mb << 20),
        config.weights.deadline_s,
    )
    rank = GeneratorRank(context, engine, subscriber, wait_for_leave=config.schedule.mode == "one_off")
    context.mailbox.on_request(Generate, rank.on_generate)
    context.mailbox.on(EndRequest, rank.on_end)
    context.mailbox.on(MayInstall, rank.on_may_install)
    context.hello()
    await rank.run()
    rank.busy.flush()
    engine.close()
    await context.bye()
