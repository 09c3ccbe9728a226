"""Each rank measures what it costs to wait for messages that do not come."""

import asyncio
import time

from common import Ping, say, start

from hpc_rollart.fabric import ComponentSpec, Mailbox, World

COMPONENTS = [ComponentSpec("env", "env", 2)]


async def main(world: World, mailbox: Mailbox) -> None:
    """Exchange one message, then sit for three seconds."""
    mailbox.on_request(Ping, lambda source, message, reply: reply(message))
    await mailbox.request(1 - world.rank, Ping(1), 10.0)
    await asyncio.sleep(0.2)
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(3.0)
    say(f"idle {(time.process_time() - cpu) / (time.perf_counter() - wall):.4f}")


start(COMPONENTS, main)
