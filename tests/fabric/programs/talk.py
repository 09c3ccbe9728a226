"""Rank 0 plays one scene with rank 1; `assert` fails the run."""

import asyncio
import sys
import time

import numpy as np
from common import Block, Ping, say, start

from hpc_rollart.fabric import ComponentSpec, DeadlineExceeded, Mailbox, World

COMPONENTS = [ComponentSpec("env", "env", 1), ComponentSpec("generate", "generator", 1, pool=0)]


async def arrays(world: World, mailbox: Mailbox) -> None:
    """Arrays of many sizes and dtypes come back as they were, and writable."""
    shapes = [(0,), (3, 0, 2), (), (5,), (1024,), (1025, 2), (1300, 1000)]
    dtypes = ["uint8", "bool", "int32", "int64", "float16", "float32", "float64", "complex64", "<U3"]
    ended = asyncio.Event()
    mailbox.on_request(Block, lambda source, message, reply: reply(message))
    mailbox.on(Ping, lambda source, message: ended.set())
    if world.rank == 1:
        await ended.wait()
        return
    rng = np.random.default_rng(0)
    for dtype in dtypes:
        for i, shape in enumerate(shapes):
            first = np.asarray(rng.integers(0, 200, shape)).astype(dtype)
            second = np.asarray(rng.random(shapes[-1 - i]).T * 1e3).astype(dtype)
            back = await mailbox.request(1, Block(i, first, second), 20.0)
            assert isinstance(back, Block) and back.number == i
            for sent, got in ((first, back.first), (second, back.second)):
                assert got.dtype == sent.dtype and got.shape == sent.shape
                assert got.flags.writeable and np.array_equal(sent, got)
    mailbox.send(1, Ping(0))
    say("all the same")


async def order(world: World, mailbox: Mailbox) -> None:
    """Small and large messages, interleaved, are handled in the order sent."""
    numbers: list[int] = []
    ended = asyncio.Event()

    def note(source: int, message: Ping | Block) -> None:
        numbers.append(message.number)
        if isinstance(message, Block):
            assert (message.first == message.number % 251).all()
        if len(numbers) == 200:
            ended.set()

    mailbox.on(Ping, note)
    mailbox.on(Block, note)
    if world.rank == 0:
        for number in range(200):
            size = 3_000_000 if number % 7 == 0 else 20_000
            data = np.full(size, number % 251, np.uint8)
            # The text makes some frames larger than MPI sends eagerly.
            ping = Ping(number, "x" * (200_000 if number % 5 == 0 else 0))
            mailbox.send(1, Block(number, data, data) if number % 3 == 0 else ping)
        await mailbox.drain(30.0)
    else:
        await ended.wait()
        assert numbers == list(range(200)), numbers
        say("in order")


async def deadline(world: World, mailbox: Mailbox) -> None:
    """A request that is never answered fails, and its error says whose answer is missing."""
    asked = asyncio.Event()
    mailbox.on_request(Ping, lambda source, message, reply: asked.set())
    if world.rank == 1:
        await asked.wait()
        return
    try:
        await mailbox.request(1, Ping(1), 0.3, what="the weather")
    except DeadlineExceeded as error:
        say(f"DeadlineExceeded: {error}")


async def later(world: World, mailbox: Mailbox) -> None:
    """Answers may be given late, in any order, and by an async handler."""
    replies: dict[int, object] = {}
    ended = asyncio.Event()

    async def answer(source: int, message: Ping, reply: object) -> None:
        replies[message.number] = reply
        if len(replies) == 5:
            for number in (3, 1, 4, 0, 2):
                await asyncio.sleep(0.01)
                replies[number](Ping(10 * number))  # type: ignore[operator]
            ended.set()

    mailbox.on_request(Ping, answer)
    if world.rank == 1:
        await ended.wait()
        return
    answers = await asyncio.gather(*(mailbox.request(1, Ping(i), 10.0) for i in range(5)))
    assert answers == [Ping(10 * i) for i in range(5)], answers
    say("each its own")


async def alone(world: World, mailbox: Mailbox) -> None:
    """A rank may write to itself, also a request; the array is not copied."""
    seen: list[tuple[int, Block]] = []
    mailbox.on(Block, lambda source, message: seen.append((source, message)))
    mailbox.on_request(Ping, lambda source, message, reply: reply(Ping(message.number + 1)))
    data = np.arange(100_000)
    mailbox.send(world.rank, Block(1, data, data))
    assert not seen, "a handler ran inside send"
    assert await mailbox.request(world.rank, Ping(1), 5.0) == Ping(2)
    assert seen[0][0] == world.rank and seen[0][1].first is data
    say("heard itself")


async def handler_error(world: World, mailbox: Mailbox) -> None:
    """What a handler raises, sync or async, ends `run` and `failed`."""

    def refuse(source: int, message: Ping) -> None:
        raise LookupError(f"no use for {message.number}")

    async def refuse_later(source: int, message: Ping) -> None:
        await asyncio.sleep(0)
        refuse(source, message)

    if world.rank == 0:
        mailbox.send(1, Ping(7))
        return
    mailbox.on(Ping, refuse if sys.argv[2] == "sync" else refuse_later)
    try:
        await mailbox.failed()
    except LookupError as error:
        say(f"surfaced: {error}")
    await asyncio.Event().wait()  # it is `run` that ends the rank


async def unhandled(world: World, mailbox: Mailbox) -> None:
    """A message that nobody handles is an error, not lost."""
    if world.rank == 0:
        mailbox.send(1, Ping(7))
        return
    try:
        await mailbox.failed()
    except Exception as error:
        say(f"surfaced: {error}")


async def drain(world: World, mailbox: Mailbox) -> None:
    """Messages that nobody takes are not waited for longer than asked."""
    if world.rank == 0:
        data = np.ones(20_000_000, np.uint8)
        mailbox.send(1, Block(0, data, data))
        try:
            await mailbox.drain(0.3)
        except DeadlineExceeded as error:
            say(f"DeadlineExceeded: {error}")
    else:
        taken = asyncio.Event()
        mailbox.on(Block, lambda source, message: taken.set())
        time.sleep(1.0)  # polls nothing meanwhile
        await taken.wait()


SCENES = {f.__name__: f for f in (arrays, order, deadline, later, alone, handler_error, unhandled, drain)}
start(COMPONENTS, SCENES[sys.argv[1]])
