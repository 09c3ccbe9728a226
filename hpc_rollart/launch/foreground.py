"""Runs a run on this machine in front of the user, from its first step or on from its checkpoint."""

import contextlib
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from hpc_rollart.config import checks, load_resolved
from hpc_rollart.config.problem import ConfigError
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError
from hpc_rollart.jobs import book
from hpc_rollart.launch import local, rundir, submit
from hpc_rollart.launch.attempt import Attempt, next_attempt
from hpc_rollart.launch.model import ensure_model
from hpc_rollart.launch.mpirun import find_mpirun
from hpc_rollart.launch.progress import make_display, summary
from hpc_rollart.launch.rundir import RunDir
from hpc_rollart.launch.world import Outcome, World
from hpc_rollart.observe.status import read_status


def begin(config: RunConfig, argv: Sequence[str], console: Console, *, live: bool) -> Outcome:
    """Make a run's directory, run it to its end and show the outcome.

    Raises
    ------
    UserError
        If no rank was started, nothing is left of the run.
    """
    find_mpirun()  # before anything is written: without it there is no run
    made = rundir.create(config, argv)
    # Before the ranks run, SIGTERM ends this program as Ctrl-C does; then `run_world` handles both.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ensure_model(config, made.path, console)
    except (KeyboardInterrupt, UserError) as error:
        # No rank has started, so nothing is lost, and the same command works once the cause is mended.
        shutil.rmtree(made.path)
        if isinstance(error, KeyboardInterrupt):
            print("\ninterrupted before any rank had started; nothing is left of the run", file=sys.stderr)
        raise
    try:
        return _go(config, made, next_attempt(made.path, config), console, live=live)
    except UserError:
        # mpirun's log is opened when it is started; from then on there may be something to keep.
        if not any((made.path / "logs").glob("*/mpirun.log")):
            shutil.rmtree(made.path)
        raise


def resume(run_dir: Path, console: Console, *, live: bool) -> Outcome:
    """Go on with a run that ended early, here, from its newest checkpoint.

    Raises
    ------
    UserError
        The run is done, still goes on somewhere, or does not fit this machine.
    """
    find_mpirun()
    path = run_dir.absolute()
    config = load_resolved(path)
    submit.refuse_if_done(path)
    with contextlib.ExitStack() as alone:
        alone.enter_context(book.alone(path))
        submit.refuse_if_queued(path)
        submit.refuse_if_alive(path)
        if problems := checks.on_this_machine(config):
            raise ConfigError([f"{'.'.join(map(str, found.path))}: {found.text}" for found in problems])
        manifest = rundir.read_manifest(path)
        if not Path(str(manifest.get("model_dir", ""))).joinpath("config.json").is_file():
            ensure_model(config, path, console)
        attempt = next_attempt(path, config)
        if attempt.passed_over:
            console.print(
                f"passed over: {attempt.passed_over}", style="yellow", markup=False, highlight=False,
                soft_wrap=True,
            )  # fmt: skip
        where = (
            f"from step {attempt.step}"
            if attempt.checkpoint
            else "from the beginning, as there is no checkpoint"
        )
        console.print(f"going on {where}: attempt {attempt.number}", style="dim", highlight=False)
        run = RunDir(path, str(manifest["run_id"]))
        # Once its coordinator reports, others see by that that the run is alive.
        return _go(config, run, attempt, console, live=live, reports=alone.close)


def _go(
    config: RunConfig,
    run: RunDir,
    attempt: Attempt,
    console: Console,
    *,
    live: bool,
    reports: Callable[[], None] = lambda: None,
) -> Outcome:
    def look(world: World) -> None:
        display.update(stopping=world.stopping)
        if (read_status(run.path) or {}).get("state", "starting") != "starting":
            reports()

    display = make_display(run.path, config.run.name, console, live=live)
    try:
        parts = ", ".join(f"{name} {part.ranks}" for name, part in config.components.items())
        display.phase(f"starting {sum(part.ranks for part in config.components.values())} ranks ({parts})")
        # From here on the directory may hold trajectories, and whatever happens it stays.
        outcome = local.run_world(config, run, look, attempt=attempt)
    finally:
        display.close()
    summary(run.path, console, _write_report(run.path, console))
    return outcome


def _write_report(run_dir: Path, console: Console) -> Path | None:
    """Write the report; a run that ended early may hold too little for one, which must not hide its end."""
    from hpc_rollart.analysis.report import write_report

    try:
        return write_report(run_dir)
    except Exception as error:
        console.print(f"no report: {error}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        return None
