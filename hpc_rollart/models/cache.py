"""From a config's `model` section to a folder with that model, making built-in ones once.

A built-in model lives in `$ROLLART_CACHE/models/NAME-HASH` (without the variable, in the user's cache
directory). The hash covers all that determines it: its settings, the tasks it is warm-started on, the code
that makes it and the versions of the libraries it is made with. A folder is made under another name and
renamed, so builders that run at the same time cost time and nothing else. One that has lost files since then
is made again.

To find a model that is there, nothing is imported that takes long; see `find`.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import platformdirs

import envs_cpu
from envs_cpu.registry import make
from hpc_rollart.folders import publish_folder
from hpc_rollart.models import smollm2
from hpc_rollart.models.folder import ModelError, check_folder, is_whole

if TYPE_CHECKING:
    from hpc_rollart.models.warmstart import DemonstratedTask, Progress, WarmStartSettings

# The warm start does not follow `run.seed`: runs of all seeds start from the same cached policy.
_SEED = 0
_ABANDONED_S = 86_400.0
_LIBRARIES = ("torch", "transformers", "tokenizers", "gymnasium", "reasoning-gym")
# What a tiny model is made by, beside the environments.
_TINY_SOURCES = ("tiny.py", "warmstart.py", "chat.py")
# Without a warm start demonstrations still teach the tokenizer its words.
_NO_WARM_START = SimpleNamespace(episodes=100, steps=0, batch=1, learning_rate=1.0, skill={})


class ModelSection(Protocol):
    """What of the config's `model` section is read here."""

    @property
    def path(self) -> str | None: ...

    @property
    def builtin(self) -> str | None: ...

    @property
    def max_context(self) -> int: ...

    @property
    def warm_start(self) -> Any: ...


def quiet(_done: int, _total: int, _message: str) -> None:
    """Progress that is shown to nobody."""


def resolve(model: ModelSection, tasks: "Sequence[DemonstratedTask]", progress: "Progress" = quiet) -> Path:
    """Folder of the model that a config asks for, built first if it is a built-in one not yet cached.

    Parameters
    ----------
    model
        The config's `model` section.
    tasks
        The config's `tasks`: a tiny model is warm-started on them.
    progress
        Called with (done, total, message) while a model is being built, and not otherwise.

    Raises
    ------
    ModelError
        If a path holds no model, a package is missing or the cache cannot be written.
    """
    if model.path is not None:
        directory = Path(model.path).expanduser()
        check_folder(directory)
        return directory
    final = _entry(model, tasks)
    return final if is_whole(final) else _build(final, model, tasks, progress)


def find(model: ModelSection, tasks: "Sequence[DemonstratedTask]") -> Path | None:
    """Folder of a built-in model if it is in the cache, whole; takes milliseconds and builds nothing.

    None also if it cannot be said; `resolve` then says why.
    """
    try:
        final = _entry(model, tasks)
    except (ModelError, OSError, importlib.metadata.PackageNotFoundError):
        return None
    return final if is_whole(final) else None


def cache_root() -> Path:
    """Where built-in models are kept."""
    root = os.environ.get("ROLLART_CACHE") or platformdirs.user_cache_dir("hpc_rollart")
    return Path(root).expanduser().absolute() / "models"


def _build(
    final: Path, model: ModelSection, tasks: "Sequence[DemonstratedTask]", progress: "Progress"
) -> Path:
    """Make a built-in model that is not in the cache, or not whole."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        _put_aside(final)
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {final.parent}: {error}; set ROLLART_CACHE"
        ) from error
    aside.chmod(0o755)
    try:
        if model.builtin == "tiny":
            _build_tiny(aside, _settings(model.warm_start), model.max_context, tasks, progress)
        else:
            smollm2.convert(aside, progress)
        check_folder(aside)
        publish_folder(aside, final, replace=False)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _put_aside(final: Path) -> None:
    """Take away what has lost files; looked at again, as another builder may just have made it anew."""
    if final.is_dir() and not is_whole(final):
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
        with contextlib.suppress(FileNotFoundError):
            final.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def _settings(section: Any) -> "WarmStartSettings":
    """The config's `model.warm_start` as settings; None means no supervised step at all."""
    from hpc_rollart.models.warmstart import WarmStartSettings

    section = section or _NO_WARM_START
    return WarmStartSettings(
        episodes=section.episodes,
        steps=section.steps,
        batch=section.batch,
        learning_rate=section.learning_rate,
        skill=dict(section.skill),
    )


def _build_tiny(
    directory: Path,
    settings: "WarmStartSettings",
    max_context: int,
    tasks: "Sequence[DemonstratedTask]",
    progress: "Progress",
) -> None:
    import torch

    from hpc_rollart.models import tiny, warmstart

    if not settings.steps:
        # The tokenizer learns what words it can; environments that show nothing are spelled out in bytes.
        tasks = [task for task in tasks if hasattr(make(task.env, **task.args), "demonstrate")]
    demonstrations = warmstart.demonstrate(tasks, settings, _SEED, progress) if tasks else []
    progress(settings.episodes, settings.episodes, "making the tokenizer")
    tokenizer = tiny.build_tokenizer(text for d in demonstrations for text in (*d.observations, *d.actions))
    model = tiny.build_model(tokenizer, max_context, _SEED)
    if settings.steps:
        episodes = [warmstart.encode(d, tokenizer, max_context) for d in demonstrations]
        with torch.enable_grad():
            warmstart.clone(model, episodes, settings, _SEED, progress)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _entry(model: ModelSection, tasks: "Sequence[DemonstratedTask]") -> Path:
    """Where a built-in model is kept: its name ends with a hash of all that determines it."""
    here = Path(__file__).parent
    if model.builtin == "smollm2-135m-instruct":
        try:
            source = smollm2.find_gguf()
        except ModelError:
            # Whoever has converted it once needs its source no more.
            if made := _newest(f"{model.builtin}-*"):
                return made
            raise
        parts: list[Any] = [source.stat().st_size]
        sources = [Path(smollm2.__file__)]
    else:
        section = model.warm_start or _NO_WARM_START
        names = [task.name for task in tasks]
        skill = {task: s for task, s in sorted(section.skill.items()) if task in names}
        warm = [section.episodes, section.steps, section.batch, section.learning_rate, skill]
        parts = [warm, model.max_context, [[t.name, t.env, t.args, t.max_turns] for t in tasks], _SEED]
        sources = [here / name for name in _TINY_SOURCES]
        sources += sorted(Path(str(envs_cpu.__file__)).parent.glob("*.py"))
    versions = [importlib.metadata.version(library) for library in _LIBRARIES]
    digest = hashlib.sha256(json.dumps([parts, versions], sort_keys=True).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return cache_root() / f"{model.builtin}-{digest.hexdigest()[:12]}"


def _newest(pattern: str) -> Path | None:
    whole = [folder for folder in cache_root().glob(pattern) if is_whole(folder)]
    return max(whole, key=lambda folder: folder.stat().st_mtime, default=None)


def _remove_abandoned(directory: Path) -> None:
    """Delete what builders that were killed left behind long ago."""
    for aside in directory.glob(".*.tmp"):
        if time.time() - aside.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(aside, ignore_errors=True)
