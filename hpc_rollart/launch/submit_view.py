"""What the verbs for a cluster print: the job that was submitted, and the status again and again."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table

from hpc_rollart.jobs.queue import POLL_S
from hpc_rollart.jobs.status import Watcher, render
from hpc_rollart.launch.placement import slurm_time
from hpc_rollart.launch.submit import Submitted


def submitted(result: Submitted, console: Console) -> None:
    """Print the job's id, where each component goes, and what one types next."""
    job, parts = result.job, result.placed
    console.print(
        f"submitted job {job.job}: {len(parts)} components, at most {slurm_time(job.time_s)}", highlight=False
    )
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "partition", "nodes", "ranks", "GPUs"):
        table.add_column(name, justify="right" if name in ("nodes", "ranks", "GPUs") else "left")
    for part in parts:
        gpus = f"{part.nodes * part.gpus} {part.gpu}" if part.gpus else "-"
        ranks = str(part.nodes * part.ranks_per_node)
        table.add_row(part.component, part.site_partition or part.partition, str(part.nodes), ranks, gpus)
    console.print(Padding(table, (1, 2), expand=False))
    where, command = shlex.quote(str(result.run_dir)), shlex.quote(_command())
    for verb, what in (
        ("status", "how it stands"),
        ("watch", "how it learns"),
        ("logs -f", "what it writes"),
        ("cancel", "end it, with a checkpoint"),
    ):
        console.print(f"  {command} {verb} {where}  [dim]# {what}[/dim]", highlight=False, soft_wrap=True)


def _command() -> str:
    """Return this program as one can type it here."""
    if shutil.which("hpc-rollart"):
        return "hpc-rollart"
    path = Path(sys.executable).with_name("hpc-rollart")
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def show_status(
    watcher: Watcher,
    console: Console,
    *,
    again: bool,
    as_json: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Print the status, if asked to again and again until the run is over, and return its exit code."""
    status = watcher.look()
    if as_json:
        print(json.dumps(status.as_json(), indent=2))
        return status.exit_code
    if not again or not console.is_terminal:
        console.print(render(status))
        while again and not status.over:  # not a terminal: a page whenever something has changed
            sleep(POLL_S)
            before, status = status, watcher.look()
            if (before.verdict, before.step) != (status.verdict, status.step):
                console.print(render(status))
        return status.exit_code
    with Live(render(status), console=console, auto_refresh=False) as live:
        try:
            while not status.over:
                sleep(POLL_S)
                status = watcher.look()
                live.update(render(status), refresh=True)
        except KeyboardInterrupt:
            return 0
    return status.exit_code
