"""A trainer and two generators play one scene of weight sync over real MPI; `assert` fails the run."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hpc_rollart.fabric import ComponentSpec, Mailbox, World, open_world
from hpc_rollart.messages import Publish, Received, Stop
from hpc_rollart.weights import (
    MpiTransport,
    Publisher,
    Subscriber,
    Transfer,
    Transport,
    WeightSyncError,
    describe,
    make_plan,
)

COMPONENTS = [ComponentSpec("generate", "generator", 2, pool=0), ComponentSpec("trainer", "trainer", 1)]
BUCKET_BYTES = 1 << 16
TRAINER = 2


def state_of(version: int) -> dict[str, torch.Tensor]:
    """A state whose every bit depends on the version; tensors smaller and larger than a bucket."""
    random = torch.Generator().manual_seed(version)

    def bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=random)

    return {
        "embed.weight": bits(1000, 160).view(torch.bfloat16),
        "norm.weight": torch.randn(77, generator=random),
        "empty": torch.empty(0, 3),
        "steps": torch.tensor(version),
        "head.weight": bits(70_001).view(torch.bfloat16),
        "transposed": torch.randn(50, 40, generator=random).T,
    }


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether two states agree in every bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == tensor.dtype
        and one[name].shape == tensor.shape
        and torch.equal(as_bytes(one[name]), as_bytes(tensor))
        for name, tensor in other.items()
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass
class Flipped:
    """A transfer that flips one bit of what it received."""

    inner: Transfer
    buffer: torch.Tensor

    def done(self) -> bool:
        """As the inner one, then damage the buffer."""
        if not self.inner.done():
            return False
        self.buffer[123] ^= 1
        return True


class Flipping:
    """A transport on which given broadcasts, counted from 0, arrive with one bit wrong."""

    def __init__(self, inner: Transport, bad: set[int]) -> None:
        self.inner, self.bad, self.count = inner, bad, -1
        self.size, self.allocate, self.exchange = inner.size, inner.allocate, inner.exchange

    def broadcast(self, buffer: torch.Tensor) -> Transfer:
        """Broadcast, and damage some."""
        self.count += 1
        transfer = self.inner.broadcast(buffer)
        return Flipped(transfer, buffer) if self.count in self.bad else transfer


def say(text: str) -> None:
    """Write one line, whole."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@dataclass
class Stage:
    """What a scene needs."""

    world: World
    mailbox: Mailbox
    transport: Transport
    stopped: asyncio.Event
    deadline_s: float = 20.0
    bucket_bytes: int = BUCKET_BYTES

    def publisher(self) -> Publisher:
        """The trainer's side."""
        plan = make_plan(describe(state_of(0)), self.bucket_bytes)
        return Publisher(self.transport, self.mailbox, self.world.weights_ranks[1:], plan, self.deadline_s)

    def subscriber(self) -> Subscriber:
        """A generator's side."""
        plan = make_plan(describe(state_of(0)), self.bucket_bytes)
        return Subscriber(self.transport, self.mailbox, TRAINER, plan, self.deadline_s)

    async def train(self, versions: int) -> list[int]:
        """Publish versions in a row, then stop the generators; returns the attempts of each."""
        publisher = self.publisher()
        attempts = []
        for version in range(1, versions + 1):
            # In a thread, as beside training: a snapshot makes no MPI call.
            await asyncio.to_thread(publisher.snapshot, state_of(version), version)
            timing = await publisher.publish()
            assert timing.version == version and timing.bytes > 0 and timing.broadcast_s > 0
            attempts.append(timing.attempts)
        self.stop()
        return attempts

    def stop(self) -> None:
        """End the generators' part."""
        for rank in self.world.generators:
            self.mailbox.send(rank, Stop(reason="done"))

    async def serve(self, check: Callable[[Subscriber, int], None] | None = None) -> list[int]:
        """Install what arrives until stopped; returns the versions served, in order."""
        subscriber = self.subscriber()
        serving = [0]
        while not self.stopped.is_set() or subscriber.receiving:
            subscriber.poll()
            staged = subscriber.ready()
            if staged is not None:
                version, state = staged
                assert same(state, state_of(version)), f"version {version} is not what was published"
                serving.append(version)
                subscriber.installed()
            if check is not None:
                check(subscriber, serving[-1])
            await asyncio.sleep(0.001)
        return serving


async def many(stage: Stage) -> None:
    """Thirty versions in a row."""
    if stage.world.role == "trainer":
        assert await stage.train(30) == [1] * 30
    else:
        assert await stage.serve() == list(range(31))
        say("thirty versions, bit-exact")


async def corrupt_once(stage: Stage) -> None:
    """One bucket of version 2 is damaged on the way to rank 1."""
    buckets = len(make_plan(describe(state_of(0)), BUCKET_BYTES).bucket_sizes)
    if stage.world.role == "trainer":
        assert await stage.train(3) == [1, 2, 1]
        say("version 2 was repeated")
        return
    if stage.world.rank == 1:
        stage.transport = Flipping(stage.transport, {buckets + 3})
    assert await stage.serve() == [0, 1, 2, 3]
    say("each version once, in order")


async def corrupt_twice(stage: Stage) -> None:
    """Both attempts at version 2 are damaged on the way to rank 1."""
    buckets = len(make_plan(describe(state_of(0)), BUCKET_BYTES).bucket_sizes)
    if stage.world.role == "trainer":
        try:
            await stage.train(3)
        except WeightSyncError as error:
            say(f"WeightSyncError: {error}")
        stage.stop()
        return
    if stage.world.rank == 1:
        stage.transport = Flipping(stage.transport, {buckets + 3, 2 * buckets})
    served = await stage.serve()
    say(f"rank {stage.world.rank} serves {served[-1]}")


async def held(stage: Stage) -> None:
    """Rank 1 keeps a version uninstalled while rank 0 gets it damaged: the repeat leaves it untouched."""
    if stage.world.role == "trainer":
        assert await stage.train(1) == [2]
        return
    if stage.world.rank == 0:
        stage.transport = Flipping(stage.transport, {1})
        assert await stage.serve() == [0, 1]
        return
    subscriber = stage.subscriber()
    staged = None
    while not stage.stopped.is_set():
        subscriber.poll()
        if subscriber.ready() is not None:
            staged = subscriber.ready()
            assert staged is not None and same(staged[1], state_of(1))
        await asyncio.sleep(0.001)
    assert staged is not None and staged is subscriber.ready()
    say("the held version stayed whole")


async def silent_receiver(stage: Stage) -> None:
    """Rank 1 never takes part."""
    stage.deadline_s = 1.0
    if stage.world.role == "trainer":
        try:
            await stage.train(1)
        except WeightSyncError as error:
            say(f"WeightSyncError: {error}")
        stage.stop()
    elif stage.world.rank == 0:
        with contextlib.suppress(WeightSyncError):
            await stage.serve()
    else:
        stage.subscriber()  # joins, and then never polls
        await stage.stopped.wait()


async def silent_sender(stage: Stage) -> None:
    """The trainer announces a version and never sends it."""
    stage.deadline_s = 1.0
    if stage.world.role == "trainer":
        publisher = stage.publisher()
        for rank in stage.world.generators:
            stage.mailbox.send(rank, Publish(version=1))
        await asyncio.sleep(2.0)
        del publisher
        return
    try:
        await stage.serve()
    except WeightSyncError as error:
        say(f"WeightSyncError: {error}")


async def other_plan(stage: Stage) -> None:
    """Rank 1 cuts the weights in another way."""
    if stage.world.rank == 1:
        stage.bucket_bytes *= 2
    if stage.world.role == "trainer":
        try:
            await stage.train(1)
        except WeightSyncError as error:
            say(f"WeightSyncError: {error}")
        stage.stop()
    else:
        await stage.serve()


async def lost_receiver(stage: Stage) -> None:
    """Rank 1 is killed when it has three versions."""
    if stage.world.role == "trainer":
        try:
            await stage.train(1000)
        except WeightSyncError as error:
            say(f"WeightSyncError: {error}")
        stage.stop()
        return

    def die(subscriber: Subscriber, serving: int) -> None:
        if stage.world.rank == 1 and serving == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.suppress(WeightSyncError):
        await stage.serve(die)


async def whole(world: World, scene: Callable[[Stage], object]) -> None:
    """Run a scene beside the mailbox's loop."""
    mailbox = Mailbox(world.comm, Publish | Received | Stop, world.name_of)
    stopped = asyncio.Event()
    mailbox.on(Stop, lambda source, message: stopped.set())
    assert world.weights_comm is not None
    work = asyncio.ensure_future(scene(Stage(world, mailbox, MpiTransport(world.weights_comm), stopped)))
    runner = asyncio.ensure_future(mailbox.run())
    await asyncio.wait((runner, work), return_when=asyncio.FIRST_COMPLETED)
    await (work if work.done() else runner)
    await mailbox.drain(10.0)
    runner.cancel()
    time.sleep(0.2)  # what was sent must have left before the process ends


SCENES = {
    f.__name__: f
    for f in (
        many,
        corrupt_once,
        corrupt_twice,
        held,
        silent_receiver,
        silent_sender,
        other_plan,
        lost_receiver,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    world = open_world(COMPONENTS)
    asyncio.run(whole(world, SCENES[sys.argv[1]]))
    world.close(graceful=sys.argv[1] in ("many", "corrupt_once", "held"))
