"""Pydantic's validation errors as problems a person can mend: key, fault and nearest right key."""

import difflib
import json
import types
import typing
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from hpc_rollart.config.problem import Path, Problem, short
from hpc_rollart.config.schema import EnvComponent, GeneratorComponent, RunConfig, TrainerComponent

_ROLES: dict[str, type[BaseModel]] = {
    "trainer": TrainerComponent,
    "generator": GeneratorComponent,
    "env": EnvComponent,
}
_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
_BOUND = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def problems(error: ValidationError, data: Any) -> list[Problem]:
    """Return the problems in `error`, raised when validating `data` as a `RunConfig`."""
    out = []
    for item in error.errors(include_url=False):
        path = _strip_role(item["loc"])
        out.append(Problem(path, _text(item["type"], item, path, data)))
    return out


def nearest(word: str, choices: list[str]) -> str | None:
    """Return the choice most like `word`, or None when none is near."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    return close[0] if close else None


def dotted(path: Path, data: Any) -> str:
    """Return `path` as a person writes it; a task is called by its name where it has one."""
    parts = [short(str(part)) for part in path]
    if len(path) > 1 and path[0] == "tasks" and isinstance(path[1], int):
        task = get(data, path[:2])
        if isinstance(task, dict) and isinstance(task.get("name"), str):
            parts[1] = short(task["name"])
    return ".".join(parts)


def _text(kind: str, item: Any, path: Path, data: Any) -> str:
    value, ctx = item["input"], item.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return _unknown_key(path, data)
        case "missing":
            field = _field(path, data)
            doc = (field.description or "").rstrip(".") if field else ""
            return "required key is missing" + (f" ({doc})" if doc else "")
        case "union_tag_not_found":
            return f"needs a role: one of {', '.join(_ROLES)}"
        case "union_tag_invalid":
            return f"role must be one of {', '.join(_ROLES)}, not {_show(value.get('role'))}" + _hint(
                str(value.get("role")), list(_ROLES)
            )
        case "literal_error":
            choices = _choices(path, data)
            return f"must be one of {', '.join(choices)}, not {_show(value)}" + _hint(str(value), choices)
        case "string_pattern_mismatch":
            return f"{_show(value)} is no name: use letters, digits, - and _, at most 64, and no - or _ first"
        case "value_error":
            return f"{ctx['error']}, not {_show(value)}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"must be {_BOUND[kind]} {next(iter(ctx.values()))}, not {_show(value)}"
        case "too_short":
            return f"needs {ctx['min_length']} or more entries"
        case "too_long":
            return f"needs {ctx['max_length']} or fewer entries"
    if kind in _EXPECTED and value is None:
        field = _field(path, data)
        mend = "" if field is None or field.is_required() else ", or remove the line to get the default"
        return f"is empty; expected {_EXPECTED[kind]}{mend}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, not {_show(value)}"
    return f"{item['msg'][0].lower()}{item['msg'][1:]}, not {_show(value)}"


def _unknown_key(path: Path, data: Any) -> str:
    *parent, key = path
    part = get(data, tuple(parent))
    if parent[:1] == ["components"] and isinstance(part, dict):
        roles = [role for role, model in _ROLES.items() if key in model.model_fields]
        if roles:
            return f"only a component of role {' or '.join(roles)} has this key, not {part.get('role')}"
    elsewhere = [f"{name}.{key}" for name in RunConfig.model_fields if key in _keys((name,), data)]
    if elsewhere:
        return f"unknown key; did you mean {' or '.join(elsewhere)}?"
    near = nearest(str(key), _keys(tuple(parent), data))
    if near is not None:
        return f"unknown key; did you mean {dotted((*parent, near), data)}?"
    valid = ", ".join(_keys(tuple(parent), data))
    return f"unknown key; keys here: {valid}"


def _strip_role(loc: tuple[int | str, ...]) -> Path:
    """Drop what pydantic adds to a location: the role of a component and the mark of a mapping's key."""
    path = tuple(part for part in loc if part != "[key]")
    if path[:1] == ("components",) and len(path) > 2 and path[2] in _ROLES:
        path = path[:2] + path[3:]
    return path


def get(data: Any, path: Path) -> Any:
    """Return what `data` holds at `path`, or None."""
    for key in path:
        in_list = isinstance(data, list) and isinstance(key, int) and key < len(data)
        if not in_list and not (isinstance(data, dict) and key in data):
            return None
        data = data[key]
    return data


def _annotation(path: Path, data: Any) -> Any:
    """Return the type the schema gives to `path`, or None where it knows none."""
    current: Any = RunConfig
    for depth, key in enumerate(path):
        current = _bare(current)
        if isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(str(key))
            current = None if field is None else field.annotation
        elif typing.get_origin(current) in (list, dict):
            current = typing.get_args(current)[-1]
            if path[0] == "components" and depth == 1:
                part = get(data, path[:2])
                current = _ROLES.get(part.get("role", "")) if isinstance(part, dict) else None
        else:
            return None
    return _bare(current)


def _bare(annotation: Any) -> Any:
    """Unwrap `Annotated` and `X | None`."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in (typing.Union, types.UnionType):
            args = [arg for arg in typing.get_args(annotation) if arg is not types.NoneType]
            if len(args) != 1:
                return annotation
            annotation = args[0]
        else:
            return annotation


def _keys(path: Path, data: Any) -> list[str]:
    model = _annotation(path, data)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _field(path: Path, data: Any) -> FieldInfo | None:
    model = _annotation(path[:-1], data)
    if isinstance(model, type) and issubclass(model, BaseModel):
        return model.model_fields.get(str(path[-1]))
    return None


def _choices(path: Path, data: Any) -> list[str]:
    return [str(choice) for choice in typing.get_args(_annotation(path, data))]


def _hint(word: str, choices: list[str]) -> str:
    near = nearest(word, choices)
    return f"; did you mean {near}?" if near else ""


def _show(value: Any) -> str:
    """Return a value as its YAML looks, shortened."""
    try:
        text = json.dumps(value, default=str)
    except ValueError:  # a list that holds itself, or a number of thousands of digits
        return f"this {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
