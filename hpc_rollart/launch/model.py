"""Gets a run's policy ready before any rank starts: makes, converts or finds it, with a progress bar."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hpc_rollart.config.load import load_resolved
from hpc_rollart.config.problem import ConfigError
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.launch.processes import end_with_parent
from hpc_rollart.launch.rundir import amend_manifest
from hpc_rollart.models.cache import find, resolve
from hpc_rollart.models.folder import ModelError

# A tiny model's matrices are too small to keep more threads busy.
_MAX_THREADS = 4
# Of a process that dies by these, somebody wanted it to stop.
_ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def ensure_model(config: RunConfig, run_dir: Path, console: Console) -> None:
    """Get the policy of the run in `run_dir` ready and note it as `model_dir` in its manifest.

    Raises
    ------
    ConfigError
        It could not be made; the reason was printed.
    """
    if config.model.path is not None:
        _note(run_dir, Path(config.model.path).expanduser().absolute())
        return
    if cached := find(config.model, config.tasks):
        _note(run_dir, cached)  # without the seconds that it takes to import torch
        return
    console.print("preparing the model ...", style="dim", highlight=False)
    # A process of its own: what torch takes in memory and threads is gone before the ranks start.
    line = [sys.executable, "-m", "hpc_rollart.launch.model", str(run_dir)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    code = subprocess.run(line, env=env, preexec_fn=end_with_parent, check=False).returncode
    if code == 130 or -code in _ASKED:
        raise KeyboardInterrupt
    if code < 0:
        by = signal.Signals(-code).name
        raise ConfigError([f"model: what prepares it was ended by {by}; is there enough memory?"])
    if code:
        raise ConfigError(["model: could not be prepared, see above"])


def build(config: RunConfig, console: Console) -> Path:
    """Make or find the policy and return its directory; shows a progress bar on `console`.

    Raises
    ------
    ConfigError
        The model cannot be made; the line says why.
    """
    # Threads that spin while they wait would take the cores from the ones that work, wherever another
    # program runs beside this one. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TQDM_DISABLE", "1")  # the bar here is the only one
    import torch

    torch.set_num_threads(min(len(os.sched_getaffinity(0)), _MAX_THREADS))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("model", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        try:
            return resolve(config.model, config.tasks, advance)
        except ModelError as error:
            raise ConfigError([f"model: {error}"]) from None


def _main(run_dir: Path) -> int:
    try:
        _note(run_dir, build(load_resolved(run_dir), Console(stderr=True)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _note(run_dir: Path, model_dir: Path) -> None:
    try:
        amend_manifest(run_dir, model_dir=str(model_dir))
    except OSError as error:
        raise ConfigError([f"run.dir: {run_dir} cannot be written: {error.strerror}"]) from None


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
