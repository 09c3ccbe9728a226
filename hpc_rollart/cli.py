"""The `hpc-rollart` command: one thin function a verb.

Whatever takes long to import is imported inside the verb that needs it, so that `--version`, `--help` and
completion answer at once. Exit codes: 0 done, 2 the input cannot be used, 3 the run failed, 130 interrupted.
"""

import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rollart import __version__
from hpc_rollart.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from hpc_rollart.config import RunConfig

EXIT_BAD_INPUT = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="hpc-rollart",
    help="Train language-model agents with reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(help="Look at a run's configuration.", no_args_is_help=True, rich_markup_mode=None)
model_app = typer.Typer(help="Prepare policies.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(model_app, name="model")

ConfPath = Annotated[Path, typer.Argument(metavar="CONF", help="YAML file of the run.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="Override one key, e.g. run.steps=100; repeatable."
    ),
]


def main() -> None:
    """Run the command and exit with its code; the user's mistakes are one line each, never a traceback."""
    try:
        app(prog_name="hpc-rollart")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"hpc-rollart {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train language-model agents with reinforcement learning."""


# --- run and watch -----------------------------------------------------------------------------------


@app.command()
def run(
    conf: ConfPath,
    override: Overrides = None,
    directory: Annotated[
        str | None, typer.Option("--dir", metavar="DIR", help="Run directory, instead of run.dir.")
    ] = None,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="One line a step instead of the live panel.")
    ] = False,
) -> None:
    """Run on this machine, from the first rank to the report. Ctrl-C stops in good order, twice at once."""
    from rich.console import Console

    from hpc_rollart.launch import rundir
    from hpc_rollart.launch.local import run_world
    from hpc_rollart.launch.model import ensure_model
    from hpc_rollart.errors import LaunchError
    from hpc_rollart.launch.mpirun import find_mpirun
    from hpc_rollart.launch.progress import make_display, summary

    config = _load(conf, [*(override or []), *([f"run.dir={_quoted(directory)}"] if directory else [])])
    find_mpirun()  # before anything is written: without it there is no run
    made = rundir.create(config, sys.argv)
    console = Console()
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
    display = make_display(made.path, config.run.name, console, live=not no_progress)
    try:
        display.phase(_starting(config))
        # From here on the directory may hold trajectories, and whatever happens it stays.
        outcome = run_world(config, made, lambda world: display.update(stopping=world.stopping))
    except LaunchError:
        shutil.rmtree(made.path)  # again no rank has started
        raise
    finally:
        display.close()
    summary(made.path, console, _write_report(made.path, console))
    if outcome.state == "failed":
        print(f"\nrun failed: {outcome.message}", file=sys.stderr)
        raise typer.Exit(EXIT_RUN_FAILED)
    if outcome.state == "interrupted":
        print("\ninterrupted" + (f": {outcome.message}" if outcome.message else ""), file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def watch(
    run_dir: RunPath,
    no_progress: Annotated[
        bool, typer.Option("--no-progress", help="One line a step instead of the live panel.")
    ] = False,
) -> None:
    """Show a run that goes on elsewhere, as `run` does; Ctrl-C ends the watching, not the run."""
    import contextlib
    import time

    from rich.console import Console

    from hpc_rollart.config import load_resolved
    from hpc_rollart.launch.progress import make_display
    from hpc_rollart.launch.view import RunView

    path = _run_dir(run_dir)
    view = RunView(path)
    limit_s = load_resolved(path).launch.stall_deadline_s
    display = make_display(path, path.name, Console(), live=not no_progress)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(display):
        while True:
            display.update()
            view.refresh()
            if view.final:
                return
            if (view.silent_s() or 0.0) > limit_s:
                break
            time.sleep(0.25)
    if (view.silent_s() or 0.0) > limit_s:
        raise UserError(f"{path}: the run has not reported for {limit_s:g} s; its launcher was killed?")


# --- configuration and models ------------------------------------------------------------------------


@config_app.command("show")
def config_show(conf: ConfPath, override: Overrides = None) -> None:
    """Check a configuration and print the resolved whole, defaults included."""
    from hpc_rollart.config import show

    print(show.dump(_load(conf, override or [])), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the YAML, for editors."""
    from hpc_rollart.config import show

    print(show.schema())


@model_app.command("build")
def model_build(conf: ConfPath, override: Overrides = None) -> None:
    """Make or convert the run's policy, so that the first `run` need not; done once, then kept."""
    from rich.console import Console

    from hpc_rollart.launch.model import build

    path = build(_load(conf, override or []), Console(stderr=True))
    print(path)


# --- looking at a run --------------------------------------------------------------------------------


@app.command()
def report(run_dir: RunPath) -> None:
    """Write the run's report.html and print where it is."""
    from hpc_rollart.analysis.report import write_report

    path = _run_dir(run_dir)
    print(write_report(path))


@app.command()
def timeline(
    run_dir: RunPath,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Output; default RUN/timeline.json.")
    ] = None,
) -> None:
    """Merge the ranks' timelines into one file for https://ui.perfetto.dev."""
    from hpc_rollart.observe.trace import merge_timelines

    path = _run_dir(run_dir)
    target = out or path / "timeline.json"
    try:
        count = merge_timelines(path, target)
    except OSError as error:
        raise UserError(str(error)) from None
    print(f"{target}: {count:,} events; open it in https://ui.perfetto.dev")


@app.command()
def audit(run_dir: RunPath) -> None:
    """Recount from the files alone: staleness, each trajectory once, whole groups, honest failures."""
    from hpc_rollart.analysis.recount import audit as recount
    from hpc_rollart.store.files import StoreError

    try:
        result = recount(_run_dir(run_dir))
    except StoreError as error:
        raise UserError(str(error)) from None
    print(result.table())
    if result.problems:
        raise typer.Exit(EXIT_RUN_FAILED)


# --- helpers -----------------------------------------------------------------------------------------


def _load(conf: Path, overrides: list[str]) -> "RunConfig":
    from hpc_rollart.config import load

    return load(conf, overrides)


def _quoted(text: str) -> str:
    """Return `text` as YAML that is text, whatever is in it."""
    import json

    return json.dumps(text)


def _run_dir(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path}: there is no such directory")
    if not (path / "config.yaml").is_file():
        raise UserError(f"{path}: is no run directory (it has no config.yaml)")
    return path


def _starting(config: "RunConfig") -> str:
    parts = ", ".join(f"{name} {part.ranks}" for name, part in config.components.items())
    return f"starting {sum(part.ranks for part in config.components.values())} ranks ({parts})"


def _write_report(run_dir: Path, console: "Console") -> Path | None:
    """Write the report; a run that ended early may hold too little for one, which must not hide its end."""
    from hpc_rollart.analysis.report import write_report

    try:
        return write_report(run_dir)
    except Exception as error:
        console.print(f"no report: {error}", style="yellow", markup=False, highlight=False, soft_wrap=True)
        return None
