"""Message types and start-up shared by the programs that the tests run under mpirun."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from hpc_rollart.fabric import ComponentSpec, Mailbox, World, open_world


class Ping(msgspec.Struct, tag=True, frozen=True):
    """A small message."""

    number: int
    text: str = ""


class Block(msgspec.Struct, tag=True, frozen=True):
    """A message with arrays of any size between small fields."""

    number: int
    first: np.ndarray
    second: np.ndarray


Main = Callable[[World, Mailbox], Awaitable[None]]


def start(components: list[ComponentSpec], main: Main, graceful: bool = True) -> None:
    """Open the world, run `main` beside the mailbox's loop, and leave."""

    async def whole(world: World) -> None:
        mailbox = Mailbox(world.comm, Ping | Block, world.name_of)
        work = asyncio.ensure_future(main(world, mailbox))  # first, so that it registers its handlers
        runner = asyncio.ensure_future(mailbox.run())
        await asyncio.wait((runner, work), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
            await mailbox.drain(10.0)
            runner.cancel()
        else:
            await runner

    world = open_world(components)
    asyncio.run(whole(world))
    world.close(graceful)


def say(text: str) -> None:
    """Write one line, whole."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
