"""What every rank's main loop is given, whatever its role."""

import asyncio
import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from hpc_rollart.config.schema import RunConfig
from hpc_rollart.fabric.mailbox import Mailbox
from hpc_rollart.fabric.world import World
from hpc_rollart.messages import Alive, Bye, Hello, Stop, StopAsked
from hpc_rollart.observe.timeline import Timeline

_ALIVE_EVERY_S = 5.0


@dataclass
class RankContext:
    """One rank's place in the run.

    Attributes
    ----------
    config
        The resolved configuration, as in `RUN/config.yaml`.
    run_dir, attempt
        Where the run writes, and which start of it this is.
    step, checkpoint
        Steps done by earlier attempts, and the checkpoint to start from; None for the model itself. The
        weights to start from are version `step`.
    timeline
        This rank's events.
    stopped
        Set when the coordinator said `Stop`; `stop_reason` then holds its reason.
    at_work
        Set from `hello` to `bye`: the coordinator expects signs of life meanwhile.
    """

    config: RunConfig
    run_dir: Path
    run_id: str
    attempt: int
    world: World
    mailbox: Mailbox
    timeline: Timeline
    step: int = 0
    checkpoint: Path | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: str = ""
    at_work: asyncio.Event = field(default_factory=asyncio.Event)
    _asked: bool = False

    def on_stop(self, _source: int, message: Stop) -> None:
        """Note the coordinator's word; the role's loop sees it and winds up."""
        self.stop_reason = self.stop_reason or message.reason
        self.stopped.set()

    def hello(self) -> None:
        """Tell the coordinator that this rank is ready for work."""
        self.mailbox.send(self.world.coordinator, Hello())
        self.at_work.set()

    def ask_to_stop(self) -> None:
        """Pass a signal to stop on to the coordinator, once."""
        if not self._asked:
            self._asked = True
            self.mailbox.send(self.world.coordinator, StopAsked())

    async def show_life(self) -> None:
        """While the rank is at work, tell the coordinator every few seconds that its event loop turns."""
        every_s = min(_ALIVE_EVERY_S, self.config.launch.heartbeat_s / 6)
        await self.at_work.wait()
        while self.at_work.is_set():
            self.mailbox.send(self.world.coordinator, Alive())
            await asyncio.sleep(every_s)

    async def bye(self) -> None:
        """Tell the coordinator that everything this rank holds is on disk."""
        self.at_work.clear()
        self.mailbox.send(self.world.coordinator, Bye())
        await self.mailbox.drain(deadline_s=30.0)


def record_end(context: RankContext, state: str, step: int, started: int) -> None:
    """Write `end.json`: how this attempt ended in good order, after how many steps and trajectories."""
    path = context.run_dir / "logs" / str(context.attempt) / "end.json"
    aside = path.with_name(".end.json")
    aside.write_text(json.dumps({"state": state, "step": step, "started": started}))
    aside.replace(path)


def record_failure(context: RankContext, rank: int, error: str) -> None:
    """Write `failure.json`, which the launcher shows; the first failure of an attempt is the one kept."""
    member = context.world.members[rank]
    record = {"component": member.component, "rank": rank, "host": member.host, "error": error}
    path = context.run_dir / "logs" / str(context.attempt) / "failure.json"
    aside = path.with_name(f".failure-{context.world.rank}.json")
    aside.write_text(json.dumps(record))
    with contextlib.suppress(FileExistsError):
        os.link(aside, path)  # whole or not at all, and only the first succeeds
    aside.unlink()
