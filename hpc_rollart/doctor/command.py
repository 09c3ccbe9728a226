"""The verb `doctor`: chooses the place, shows what is being done, prints the table or JSON."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError
from rich.console import Console

from hpc_rollart.config.cluster import load_cluster
from hpc_rollart.config.problem import short
from hpc_rollart.config.schema import Seconds
from hpc_rollart.doctor import by_job, examine, results
from hpc_rollart.doctor.examine import Say
from hpc_rollart.errors import UserError
from hpc_rollart.launch.placement import with_choices


def diagnose(
    conf: Path,
    overrides: Sequence[str],
    *,
    cluster: str | None = None,
    cluster_overrides: Sequence[str] = (),
    account: str | None = None,
    qos: str | None = None,
    wait: str = "10m",
    shared: bool = False,
    as_json: bool = False,
) -> int:
    """Examine, print what was found on stdout, and return the exit code: 2 if something would fail.

    Parameters
    ----------
    conf, overrides
        The run.
    cluster
        Profile, by name or file; without one this machine is meant, or the job that this process is in.
    wait
        Longest time that the job is waited for in the queue.

    Raises
    ------
    UserError
        Config or profile cannot be read.
    """
    began = time.monotonic()
    # A terminal that goes away is like Ctrl-C: nothing is to be left in the queue or on the nodes.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    config = examine.load_unchecked(conf, list(overrides))
    limit_s = _seconds(wait)
    inside = by_job.inside_job(config)
    name = cluster or (config.cluster if inside else None)
    with _telling() as say:
        if name is None:
            where, found = "this machine", examine.examine_here(config, say)
        else:
            profile = with_choices(
                load_cluster(name, list(cluster_overrides)), account=account, qos=qos, time=None
            )
            if inside:
                where, found = "this job's nodes", by_job.examine_inside(config, profile, say)
            else:
                asked = by_job.Wait(limit_s, say)
                where, found = (
                    f"cluster {Path(name).stem}",
                    by_job.examine_cluster(config, profile, asked, shared=shared),
                )
    took_s = time.monotonic() - began
    if as_json:
        print(results.as_json(found, where, took_s))
    else:
        results.show(found, where, Console(), took_s)
    return results.exit_code(found)


def _seconds(text: str) -> float:
    try:
        bounded: TypeAdapter[float] = TypeAdapter(Annotated[Seconds, Field(allow_inf_nan=False)])
        return bounded.validate_python(text)
    except ValidationError:
        raise UserError(f"--wait {short(text)}: expected a duration such as 90s, 10m or 2h") from None


@contextlib.contextmanager
def _telling() -> Iterator[Say]:
    """Show on stderr what is being done: as one line that changes, or line by line without a terminal."""
    console = Console(stderr=True)
    last = ""
    if console.is_terminal:
        with console.status("", spinner="line") as status:
            yield lambda text: status.update(text)
        return

    def say(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            print(f"{text} ...", file=sys.stderr, flush=True)

    yield say
