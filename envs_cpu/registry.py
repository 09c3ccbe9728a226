"""Names to environments: the built-in ones, and `module:Class` for one's own."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from envs_cpu.api import EnvConfigError, TextEnv


@dataclass(frozen=True)
class _Builtin:
    """Where a built-in environment lives, and the third-party modules that take long to import."""

    module: str
    cls: str
    needs: tuple[str, ...]


_BUILTINS = {
    "frozen-lake": _Builtin("envs_cpu.frozen_lake", "FrozenLake", ("gymnasium.envs.toy_text.frozen_lake",)),
    "reasoning-gym": _Builtin("envs_cpu.reasoning_gym_env", "ReasoningGym", ("reasoning_gym",)),
}


def names() -> list[str]:
    """Names of the built-in environments."""
    return sorted(_BUILTINS)


def make(name: str, **args: Any) -> TextEnv:
    """Make an environment.

    Parameters
    ----------
    name
        A built-in name (`names()`) or an entry path, `package.module:Class`.
    **args
        The environment's own arguments.

    Raises
    ------
    EnvConfigError
        The name or an argument is wrong.
    """
    check_env(name, args)
    environment: TextEnv = _factory(name)(**args)
    return environment


def check_env(name: str, args: dict[str, Any]) -> None:
    """Check a name and its arguments without making the environment or playing an episode.

    A class that has a pydantic model `Args` is checked against it (and against `Args.check()`, where there
    is one); any other against the signature of its constructor.

    Raises
    ------
    EnvConfigError
        With one message for everything that is wrong, naming each key and the nearest valid one.
    """
    factory = _factory(name)
    model = getattr(factory, "Args", None)
    if isinstance(model, type) and issubclass(model, BaseModel):
        try:
            checked = model.model_validate(args)
        except ValidationError as error:
            problems = "; ".join(_explain(item, model) for item in error.errors())
            raise EnvConfigError(f"env {name!r}: {problems}") from None
        if check := getattr(checked, "check", None):
            check()
        return
    try:
        inspect.signature(factory).bind(**args)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters) or "no arguments"
        raise EnvConfigError(f"env {name!r}: args: {error}; it takes {takes}") from None


def preload(name: str) -> None:
    """Import what a built-in environment needs, so that processes forked later need not.

    A name that is no built-in one is left to whoever makes it: importing runs its author's code.
    """
    if builtin := _BUILTINS.get(name):
        for module in (builtin.module, *builtin.needs):
            importlib.import_module(module)


def nearest(word: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?` for a mistyped word, else what would have been valid (at most twelve)."""
    valid = sorted(valid)
    if close := difflib.get_close_matches(word, valid, n=3, cutoff=0.5):
        return f"did you mean {' or '.join(repr(w) for w in close)}?"
    shown = ", ".join(valid[:12]) + (", ..." if len(valid) > 12 else "")
    return f"valid are: {shown}"


def _factory(name: str) -> Callable[..., Any]:
    if builtin := _BUILTINS.get(name):
        cls: Callable[..., Any] = getattr(importlib.import_module(builtin.module), builtin.cls)
        return cls
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        hint = nearest(name, _BUILTINS)
        raise EnvConfigError(f"env {name!r}: no such environment; {hint} (one's own: `module:Class`)")
    # A console script does not see the directory it is started from; a run's own environments lie there.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EnvConfigError(
            f"env {name!r}: {error}; install it, or put its folder on PYTHONPATH or in {os.getcwd()}"
        ) from None
    if not hasattr(module, attribute):
        classes = [n for n, value in vars(module).items() if inspect.isclass(value)]
        raise EnvConfigError(
            f"env {name!r}: {module_name} has no {attribute!r}; {nearest(attribute, classes)}"
        )
    found: Callable[..., Any] = getattr(module, attribute)
    missing = [m for m in ("reset", "step", "close") if not callable(getattr(found, m, None))]
    if missing:
        raise EnvConfigError(
            f"env {name!r}: {attribute} has no {', '.join(missing)}; see envs_cpu.api.TextEnv"
        )
    return found


def _explain(item: Any, model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in item["loc"])
    where = f"args.{key}" if key else "args"
    if item["type"] == "extra_forbidden":
        return f"{where}: unknown key; {nearest(key, model.model_fields)}"
    if item["type"] == "missing":
        return f"{where}: missing; it has no default"
    return f"{where}: {item['msg']} (got {item['input']!r})"
