"""From a YAML file and `-o` overrides to a checked `RunConfig`, or to one error with every mend."""

import copy
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from hpc_rollart.config import checks, explain
from hpc_rollart.config.problem import PATH, ConfigError, Path, Problem, short
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.config.yaml_text import Document, parse, syntax_problem

__all__ = ["ConfigError", "check_document", "load", "load_resolved"]

Parsed = TypeVar("Parsed", bound=BaseModel)

_NO_TEXT = re.compile(r"[\0\ud800-\udfff]")
# Its form is right, but Python refuses it: the 45th of a month, a number of thousands of digits.
_OUT_OF_RANGE = "a number or date in it is out of range"


@dataclass(frozen=True)
class _Override:
    text: str
    path: Path
    value: Any


def load(path: str | FilePath, overrides: Sequence[str] = (), *, here: bool = True) -> RunConfig:
    """Read, override, validate and check a run's config.

    Parameters
    ----------
    path
        YAML file.
    overrides
        `a.b.c=value` each; the value is YAML. A task is named by its index or its name:
        `tasks.0.weight=2`, `tasks.frozen-lake.weight=2`.
    here
        Whether the run is to start on this machine alone: then it must fit on it.

    Raises
    ------
    ConfigError
        The file cannot be read, or the run could not start on this machine; one line per problem.
    """

    def across(config: RunConfig) -> list[Problem]:
        found = checks.across_keys(config)
        return found or (checks.on_this_machine(config) if here else checks.on_a_cluster(config))

    return check_document(path, overrides, RunConfig, across=across)


def load_resolved(run_dir: str | FilePath) -> RunConfig:
    """Read `config.yaml` of an existing run; nothing about this machine is checked.

    Raises
    ------
    ConfigError
        There is no such file, or this version does not understand it.
    """
    path = FilePath(run_dir) / "config.yaml"
    document = _read(path)
    return _validate(document.data, _locator(str(path), document, [], document.data), RunConfig)


def check_document(
    path: str | FilePath,
    overrides: Sequence[str],
    model: type[Parsed],
    *,
    explained: Callable[[ValidationError, Any], list[Problem]] = explain.problems,
    across: Callable[[Parsed], list[Problem]] | None = None,
) -> Parsed:
    """Read, override and validate a file, a run's or another; nothing is checked beyond what is asked for.

    Parameters
    ----------
    path, overrides
        As `load`.
    model
        What the file says.
    explained
        Puts pydantic's error on the given data into words.
    across
        Checks what no single key tells, once the model is valid.

    Raises
    ------
    ConfigError
        As `load`.
    """
    document = _read(FilePath(path))
    data, applied = _apply(document.data, overrides)
    where = _locator(str(path), document, applied, data)
    if odd := list(_no_text(data)):
        raise ConfigError([where(problem) for problem in odd])
    parsed = _validate(data, where, model, explained)
    if across is not None and (problems := across(parsed)):
        raise ConfigError([where(problem) for problem in problems])
    return parsed


def _read(path: FilePath) -> Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{_shown_path(path)}: there is no such file"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError([f"{_shown_path(path)}: cannot be read: {reason}"]) from None
    try:
        document = Document(text)
    except yaml.YAMLError as error:
        line, reason = syntax_problem(error)
        raise ConfigError([f"{path}{f':{line}' if line else ''}: not valid YAML: {reason}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: not a config: it is nested too deeply"]) from None
    except (ValueError, OverflowError):
        raise ConfigError([f"{path}: not valid YAML: {_OUT_OF_RANGE}"]) from None
    if not isinstance(document.data, dict):
        raise ConfigError([f"{path}: expected keys such as run, model and tasks at the top"])
    return document


def _shown_path(path: FilePath) -> str:
    return short(str(path), PATH)


def _no_text(data: Any) -> Iterator[Problem]:
    """Return which keys and values no file, command line or variable can hold, so that nothing fails later.

    A byte of the command line that is no UTF-8 comes here as half of a surrogate pair.
    """
    seen: set[int] = set()  # by YAML's aliases a part may stand in many places, or in itself
    left: deque[tuple[Path, Any]] = deque([((), data)])
    while left:
        path, value = left.popleft()
        if isinstance(value, dict | list) and id(value) not in seen:
            seen.add(id(value))
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            left += [((*path, key), part) for key, part in entries]
        words = [word for word in (value, *path[-1:]) if isinstance(word, str)]
        if found := _NO_TEXT.search("".join(words)):
            yield Problem(path, f"has {short(found.group())} in it, which is no text; remove it")


def _validate(
    data: Any,
    where: Callable[[Problem], str],
    model: type[Parsed],
    explained: Callable[[ValidationError, Any], list[Problem]] = explain.problems,
) -> Parsed:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError([where(problem) for problem in explained(error, data)]) from None


def _locator(file: str, document: Document, applied: list[_Override], data: Any) -> Callable[[Problem], str]:
    """Return a function that writes a problem as one line, naming the file and line or the override."""

    def where(problem: Problem) -> str:
        key = explain.dotted(problem.path, data)
        also = ""
        for override in reversed(applied):
            below = problem.path[: len(override.path)] == override.path
            above = override.path[: len(problem.path)] == problem.path
            if below or (above and not _holds(document.data, problem.path)):
                return f"-o {short(override.text)}: {key}: {problem.text}"
            if above:
                also = also or f" (with -o {short(override.text)})"
        line = document.line(problem.path)
        return f"{file}{f':{line}' if line else ''}: {key}: {problem.text}{also}"

    return where


def _holds(data: Any, path: Path) -> bool:
    """Return whether `data` has the key `path`."""
    parent = explain.get(data, path[:-1])
    return isinstance(parent, list) or (isinstance(parent, dict) and path[-1] in parent)


# --- overrides ---------------------------------------------------------------------------------------


def _apply(data: dict[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], list[_Override]]:
    """Return a copy of `data` with all overrides in it."""
    data = copy.deepcopy(data)
    applied: list[_Override] = []
    lines: list[str] = []
    for text in overrides:
        try:
            applied.append(_apply_one(data, text))
        except ValueError as error:
            lines.append(f"-o {short(text)}: {error}")
    if lines:
        raise ConfigError(lines)
    return data, applied


def _apply_one(data: dict[str, Any], text: str) -> _Override:
    dotted, equals, raw = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ValueError("expected KEY=VALUE, for example run.steps=100")
    try:
        value = parse(raw)
    except yaml.YAMLError as error:
        raise ValueError(f"the value is not valid YAML: {syntax_problem(error)[1]}") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    except (ValueError, OverflowError):
        raise ValueError(f"the value is not valid YAML: {_OUT_OF_RANGE}") from None
    here: Any = data
    path: Path = ()
    for depth, key in enumerate(keys):
        last = depth == len(keys) - 1
        if isinstance(here, list):
            index = _index(here, key, _shown(keys[:depth]))
            path = (*path, index)
            if last:
                here[index] = value
            here = here[index]
        elif isinstance(here, dict):
            if path == ("components",) and not last and key not in here:
                raise ValueError(f"no component is named '{short(key)}'; components: {', '.join(here)}")
            path = (*path, key)
            if last:
                here[key] = value
            elif here.get(key) is None:
                here[key] = {}
            here = here[key]
        else:
            raise ValueError(f"{_shown(keys[:depth])} is a single value and has no key '{short(key)}'")
    return _Override(text, path, value)


def _shown(keys: Sequence[str]) -> str:
    return ".".join(map(short, keys))


def _index(entries: list[Any], key: str, where: str) -> int:
    names = [str(entry.get("name")) if isinstance(entry, dict) else "" for entry in entries]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(entries):
        return int(key)
    last = len(entries) - 1
    raise ValueError(f"{where} has no entry '{short(key)}'; entries: {', '.join(names)} (or 0 to {last})")
