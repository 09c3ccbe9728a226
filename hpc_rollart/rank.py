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
from hpc_rollart.messages import Bye, Hello, Stop
from hpc_rollart.observe.timeline import Timeline


@dataclass
class RankContext:
    """One rank's place in the run.

    Attributes
    ----------
    config
        The resolved configuration, as in `RUN/config.yaml`.
    run_dir, attempt
        Where the run writes, and which start of it this is.
    timeline
        This rank's events.
    stopped
        Set when the coordinator said `Stop`; `stop_reason` then holds its reason.
    """

    config: RunConfig
    run_dir: Path
    run_id: str
    attempt: int
    world: World
    mailbox: Mailbox
    timeline: Timeline
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    stop_reason: str = ""

    def on_stop(self, _source: int, message: Stop) -> None:
        """Note the coordinator's word; the role's loop sees it and winds up."""
        self.stop_reason = self.stop_reason or message.reason
        self.stopped.set()

    def hello(self) -> None:
        """Tell the coordinator that this rank is ready for work."""
        self.mailbox.send(self.world.coordinator, Hello())

    async def bye(self) -> None:
        """Tell the coordinator that everything this rank holds is on disk."""
        self.mailbox.send(self.world.coordinator, Bye())
        await self.mailbox.drain(deadline_s=30.0)


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
