"""Rank 2 is killed while rank 0 waits for its answer; ranks 0 and 1 go on."""

import asyncio
import os
import signal

import numpy as np
from common import Block, Ping, say, start

from hpc_rollart.fabric import ComponentSpec, Mailbox, RankLost, World

COMPONENTS = [ComponentSpec("env", "env", 2), ComponentSpec("generate", "generator", 1, pool=0)]


async def main(world: World, mailbox: Mailbox) -> None:
    """Play the three parts."""
    lost: list[int] = []
    ended = asyncio.Event()

    def die(source: int, message: Ping, reply: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def echo(source: int, message: Ping, reply: object) -> None:
        reply(message)  # type: ignore[operator]
        if message.number == 99:
            ended.set()

    mailbox.on_lost(lost.append)
    mailbox.on_request(Ping, die if world.rank == 2 else echo)
    if world.rank == 0:
        data = np.ones(5_000_000)
        try:
            await mailbox.request(2, Ping(0), 20.0, what="a last word")
        except RankLost as error:
            say(f"RankLost: {error}")
        assert mailbox.send(2, Block(1, data, data)) is False
        try:
            await mailbox.request(2, Ping(1), 20.0)
        except RankLost:
            say("not asked again")
        for number in range(100):
            assert await mailbox.request(1, Ping(number), 20.0) == Ping(number)
    else:
        await ended.wait()
        while not lost:
            await asyncio.sleep(0.01)
    assert lost == [2] and mailbox.lost == {2}
    say(f"rank {world.rank} went on")


start(COMPONENTS, main, graceful=False)
