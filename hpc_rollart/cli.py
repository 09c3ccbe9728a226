"""The `hpc-rollart` command: one thin function a verb.

Whatever takes long to import is imported inside the verb that needs it, so that `--version`, `--help` and
completion answer at once. Exit codes: 0 done, 2 the input cannot be used, 3 the run failed, 130 interrupted.
"""

import errno
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpc_rollart import __version__
from hpc_rollart.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from hpc_rollart.config import RunConfig
    from hpc_rollart.launch.world import Outcome

EXIT_BAD_INPUT = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130
_LINE = 1500

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
Directory = Annotated[
    str | None, typer.Option("--dir", metavar="DIR", help="Run directory, instead of run.dir.")
]
NoProgress = Annotated[bool, typer.Option("--no-progress", help="One line a step instead of the live panel.")]
ClusterOverrides = Annotated[
    list[str] | None,
    typer.Option("-c", metavar="KEY=VALUE", help="Override one key of the cluster profile; repeatable."),
]
Account = Annotated[str | None, typer.Option("--account", metavar="NAME", help="Account to charge.")]
Qos = Annotated[str | None, typer.Option("--qos", metavar="NAME", help="Quality of service.")]
Time = Annotated[
    str | None, typer.Option("--time", metavar="TIME", help="Time limit of the job, such as 12h or 12:00:00.")
]


def main() -> None:
    """Run the command and exit with its code; the user's mistakes are one line each, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What somebody typed may be no text in this encoding, and is quoted all the same.
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="hpc-rollart")
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {_cut(line)}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED if _by_ctrl_c(error) else EXIT_BAD_INPUT)
    except OSError as error:
        # Whatever looks at a path first; only what was typed can be that long.
        if error.errno != errno.ENAMETOOLONG:
            raise
        print(f"error: {_cut(str(error.filename), 300)}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)


def _cut(line: str, limit: int = _LINE) -> str:
    """Return a line of an error that does not fill the screen, whatever it quotes; the mend is at its end."""
    return line if len(line) <= limit else f"{line[: limit - 205]} ... {line[-200:]}"


def _by_ctrl_c(error: BaseException | None) -> bool:
    """Whether an error is about what Ctrl-C broke off."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


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
    directory: Directory = None,
    no_progress: NoProgress = False,
) -> None:
    """Run on this machine, from the first rank to the report. Ctrl-C stops in good order, twice at once."""
    from hpc_rollart.launch import foreground

    config = _load(conf, [*(override or []), *_directory(directory)])
    _finish(foreground.begin(config, sys.argv, _console(), live=not no_progress))


@app.command()
def resume(run_dir: RunPath, no_progress: NoProgress = False) -> None:
    """Go on with a run that ended early, on this machine, from its newest checkpoint."""
    from hpc_rollart.launch import foreground

    _finish(foreground.resume(_run_dir(run_dir), _console(), live=not no_progress))


@app.command()
def watch(run_dir: RunPath, no_progress: NoProgress = False) -> None:
    """Show a run that goes on elsewhere, as `run` does; Ctrl-C ends the watching, not the run."""
    import contextlib
    import time

    from rich.console import Console

    from hpc_rollart.config import load_resolved
    from hpc_rollart.jobs.follow import Over
    from hpc_rollart.launch.progress import make_display

    path = _run_dir(run_dir)
    over = Over(path)
    display = make_display(path, load_resolved(path).run.name, Console(), live=not no_progress)
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(display):
        while not over() and not over.silence:
            display.update()
            time.sleep(0.25)
    if over.silence:
        raise UserError(over.silence)


@app.command()
def doctor(
    conf: ConfPath,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="NAME", help="Cluster profile; default: this machine is meant."),
    ] = None,
    override: Overrides = None,
    cluster_override: ClusterOverrides = None,
    account: Account = None,
    qos: Qos = None,
    directory: Directory = None,
    wait: Annotated[
        str, typer.Option("--wait", metavar="TIME", help="Longest wait for its job in the queue.")
    ] = "10m",
    shared: Annotated[
        bool, typer.Option("--shared", help="All nodes see the paths, though they look local to one.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Find out whether a run will start, here or on a cluster by a short job. Exit code 2 if it would not."""
    from hpc_rollart.doctor.command import diagnose

    code = diagnose(
        conf,
        [*(override or []), *_directory(directory)],
        cluster=cluster,
        cluster_overrides=cluster_override or [],
        account=account,
        qos=qos,
        wait=wait,
        shared=shared,
        as_json=as_json,
    )
    if code:
        raise typer.Exit(code)


# --- on a cluster ------------------------------------------------------------------------------------


@app.command()
def submit(
    conf: ConfPath,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="NAME", help="Cluster profile, by name or file; default: the run's."
        ),
    ] = None,
    override: Overrides = None,
    cluster_override: ClusterOverrides = None,
    account: Account = None,
    qos: Qos = None,
    time: Time = None,
    directory: Directory = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="All nodes see the paths, though they look local to one.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script; submit nothing, make nothing.")
    ] = False,
) -> None:
    """Submit to Slurm as one heterogeneous job; run this on a login node."""
    from hpc_rollart.config import load
    from hpc_rollart.config.cluster import load_cluster
    from hpc_rollart.launch import submit as submitting
    from hpc_rollart.launch.placement import with_choices
    from hpc_rollart.launch.submit_view import submitted

    config = load(conf, [*(override or []), *_directory(directory)], here=False)
    name = cluster or config.cluster
    if not name:
        raise UserError("no cluster: give --cluster NAME, or set `cluster` in the run's file")
    profile = load_cluster(name, cluster_override or [])
    profile = with_choices(profile, account=account, qos=qos, time=time)
    if dry_run:
        print(submitting.script(config, profile, shared=shared), end="")
        return
    submitted(submitting.submit(config, profile, sys.argv, shared=shared), _console())


@app.command()
def resubmit(
    run_dir: RunPath,
    cluster_override: ClusterOverrides = None,
    account: Account = None,
    qos: Qos = None,
    time: Time = None,
) -> None:
    """Submit another job for a run that ended early; it goes on from its newest checkpoint."""
    from hpc_rollart.jobs import book
    from hpc_rollart.launch import submit as submitting
    from hpc_rollart.launch.placement import with_choices
    from hpc_rollart.launch.submit_view import submitted

    path = _run_dir(run_dir)
    book.latest(path)  # a run that was never submitted has no profile, and this says so
    profile = book.load_resolved_cluster(path, cluster_override or [])
    profile = with_choices(profile, account=account, qos=qos, time=time)
    submitted(submitting.resubmit(path, profile), _console())


@app.command()
def status(
    run_dir: RunPath,
    watch_it: Annotated[bool, typer.Option("--watch", help="Look again every five seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show how a run and its Slurm job stand. Exit code 0 while all is well, 3 failed, 130 stopped."""
    from hpc_rollart.jobs.status import Watcher
    from hpc_rollart.launch.submit_view import show_status

    code = show_status(Watcher(_run_dir(run_dir)), _console(), again=watch_it, as_json=as_json)
    if code:
        raise typer.Exit(code)


@app.command()
def logs(
    run_dir: RunPath,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="A rank's log.")] = None,
    component: Annotated[
        str | None, typer.Option("--component", metavar="NAME", help="The logs of a component's ranks.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", help="Of this attempt; default: the newest.")
    ] = None,
    lines: Annotated[
        int, typer.Option("-n", "--lines", metavar="LINES", min=0, help="Last lines; 0: all of them.")
    ] = 50,
) -> None:
    """Show what the batch step wrote, or a rank, or a component's ranks."""
    import contextlib

    from hpc_rollart.jobs import follow as following

    path = _run_dir(run_dir)
    choice = following.Choice(rank, component, attempt)
    choice.check(path)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        if follow:
            following.follow(path, choice, lines, _raw)
        else:
            following.show(path, choice, lines, _raw)


@app.command()
def cancel(
    run_dir: RunPath,
    now: Annotated[bool, typer.Option("--now", help="At once, without a checkpoint.")] = False,
) -> None:
    """End the run's Slurm job for good: it stops in good order, with a checkpoint, and is not requeued."""
    from hpc_rollart.jobs.cancel import cancel as end

    end(_run_dir(run_dir), now=now)


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
    try:
        if not path.is_dir():
            raise UserError(f"{path}: there is no such directory")
        if not (path / "config.yaml").is_file():
            raise UserError(f"{path}: is no run directory (it has no config.yaml)")
    except OSError as error:  # a run directory is its user's alone
        raise UserError(f"{_cut(str(path), 300)}: cannot be read: {error.strerror}") from None
    return path


def _directory(directory: str | None) -> list[str]:
    return [f"run.dir={_quoted(directory)}"] if directory is not None else []


def _console() -> "Console":
    from rich.console import Console

    return Console()


def _raw(data: bytes) -> None:
    """Write a log as it is, whatever bytes are in it."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(sys.stdout.fileno(), rest) :]


def _finish(outcome: "Outcome") -> None:
    if outcome.state == "failed":
        print(f"\nrun failed: {outcome.message}", file=sys.stderr)
        raise typer.Exit(EXIT_RUN_FAILED)
    if outcome.state == "interrupted":
        print("\ninterrupted" + (f": {outcome.message}" if outcome.message else ""), file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED)
