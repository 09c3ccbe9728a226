"""From a config's `model` section to a folder with that model, making built-in ones once.

A built-in model lives in `$ROLLART_CACHE/models/NAME-HASH` (without the variable, in the user's cache
directory). The hash covers all that determines it: its settings, the tasks it is warm-started on, the code
that makes it and the versions of the libraries it is made with. A folder that is there is whole: it is made
under another name and renamed, so builders that run at the same time cost time and nothing else.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import platformdirs
import torch

import envs_cpu
from envs_cpu.registry import make
from hpc_rollart.folders import publish_folder
from hpc_rollart.models import chat, smollm2, tiny, warmstart
from hpc_rollart.models.load import ModelError, check_folder
from hpc_rollart.models.warmstart import DemonstratedTask, Progress, WarmStartSettings

# The warm start does not follow `run.seed`: runs of all seeds start from the same cached policy.
_SEED = 0
_ABANDONED_S = 86_400.0
_LIBRARIES = ("torch", "transformers", "tokenizers", "gymnasium", "reasoning-gym")
# Without a warm start demonstrations still teach the tokenizer its words.
_NO_WARM_START = WarmStartSettings(episodes=100, steps=0, batch=1, learning_rate=1.0, skill={})


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


def resolve(model: ModelSection, tasks: Sequence[DemonstratedTask], progress: Progress = quiet) -> Path:
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
    return build(
        str(model.builtin), warm_start_settings(model.warm_start), model.max_context, tasks, progress
    )


def warm_start_settings(section: Any) -> WarmStartSettings:
    """The config's `model.warm_start` as settings; None means no supervised step at all."""
    if section is None:
        return _NO_WARM_START
    return WarmStartSettings(
        episodes=section.episodes,
        steps=section.steps,
        batch=section.batch,
        learning_rate=section.learning_rate,
        skill=dict(section.skill),
    )


def build(
    name: str,
    settings: WarmStartSettings,
    max_context: int,
    tasks: Sequence[DemonstratedTask],
    progress: Progress = quiet,
) -> Path:
    """Folder of the built-in model `name`, from the cache or made now."""
    final = cache_root() / f"{name}-{_key(name, settings, max_context, tasks)}"
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(final.parent)
        aside = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".tmp", dir=final.parent))
    except OSError as error:
        raise ModelError(
            f"cannot write the model cache {final.parent}: {error}; set ROLLART_CACHE"
        ) from error
    aside.chmod(0o755)
    try:
        if name == "tiny":
            _build_tiny(aside, settings, max_context, tasks, progress)
        else:
            smollm2.convert(aside, progress)
        check_folder(aside)
        publish_folder(aside, final, replace=False)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def cache_root() -> Path:
    """Where built-in models are kept."""
    root = os.environ.get("ROLLART_CACHE") or platformdirs.user_cache_dir("hpc_rollart")
    return Path(root).expanduser() / "models"


def _build_tiny(
    directory: Path,
    settings: WarmStartSettings,
    max_context: int,
    tasks: Sequence[DemonstratedTask],
    progress: Progress,
) -> None:
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


def _key(name: str, settings: WarmStartSettings, max_context: int, tasks: Sequence[DemonstratedTask]) -> str:
    """Hash of all that determines the model; 12 hexadecimal digits."""
    if name == "smollm2-135m-instruct":
        parts: list[Any] = [smollm2.find_gguf().stat().st_size]
        sources = [Path(smollm2.__file__)]
    else:
        names = [task.name for task in tasks]
        skill = {task: s for task, s in sorted(settings.skill.items()) if task in names}
        warm = [settings.episodes, settings.steps, settings.batch, settings.learning_rate, skill]
        parts = [warm, max_context, [[t.name, t.env, t.args, t.max_turns] for t in tasks], _SEED]
        sources = [Path(str(module.__file__)) for module in (tiny, warmstart, chat)]
        sources += sorted(Path(str(envs_cpu.__file__)).parent.glob("*.py"))
    versions = [importlib.metadata.version(library) for library in _LIBRARIES]
    digest = hashlib.sha256(json.dumps([parts, versions], sort_keys=True).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def _remove_abandoned(directory: Path) -> None:
    """Delete what builders that were killed left behind long ago."""
    for aside in directory.glob(".*.tmp"):
        if time.time() - aside.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(aside, ignore_errors=True)
