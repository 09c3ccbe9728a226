"""Writes docs/configuration.md, and the table of docs/clusters.md, from the docstrings of the schemas."""

import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hpc_rollart.config.cluster import Cluster
from hpc_rollart.config.schema import (
    Component,
    EnvComponent,
    GeneratorComponent,
    RunConfig,
    TrainerComponent,
)

PAGE = Path(__file__).with_name("configuration.md")
CLUSTERS = Path(__file__).with_name("clusters.md")
_BEGIN, _END = "<!-- keys: written by make docs -->", "<!-- end of keys -->"
_INTRO = """# Configuration

A run is one YAML file. `hpc-rollart config show conf/quickstart.yaml` checks one and prints it with every
default filled in. Unknown keys, wrong types and settings that do not fit together are errors that name the
key and the mend.

Any key can be overridden on the command line; the value is YAML. A task is named by its index or its name:

```bash
hpc-rollart config show conf/quickstart.yaml -o run.steps=100 -o tasks.0.weight=2
```

Durations are seconds, or text such as `90s`, `30m`, `12h`, `1h30m`.

For completion and checking in an editor, save the output of `hpc-rollart config schema` and name it in the
first line of a file: `# yaml-language-server: $schema=rollart.schema.json`.

This page is written by `make docs` from the schema.
"""
_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def page() -> str:
    """Return the whole page."""
    parts = [_INTRO]
    for name, field in RunConfig.model_fields.items():
        parts.append(f"\n## {name}\n\n{field.description}\n")
        if name == "components":
            parts.append(_components())
            continue
        models = _models(field.annotation)
        parts.append(_table(models[0]) if models else "")
    return "".join(parts)


def clusters_page(text: str) -> str:
    """Return docs/clusters.md, given as `text`, with the table of keys between its markers anew."""
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n{_table(Cluster)}\n{_END}{after}"


def _components() -> str:
    text = "\nA mapping from a name of your choice to a component. Keys of every component:\n"
    common = set(Component.model_fields)
    text += _table(Component)
    text += (
        "\nThere is exactly one trainer rank. The first rank of the first component of role `env` "
        "coordinates\nthe run, so that component needs two ranks or more.\n"
    )
    roles = (("trainer", TrainerComponent), ("generator", GeneratorComponent), ("env", EnvComponent))
    for role, model in roles:
        text += f"\n### Role {role}\n\n{model.__doc__}\n"
        text += _table(model, only=set(model.model_fields) - common, nested=role != "generator")
    return text


def _table(model: type[BaseModel], only: set[str] | None = None, *, nested: bool = True) -> str:
    rows = ["", "| key | type | default | meaning |", "|---|---|---|---|"]
    rows += _rows(model, "", only, nested=nested)
    return "\n".join(rows) + "\n"


def _rows(
    model: type[BaseModel], prefix: str, only: set[str] | None = None, *, nested: bool = True
) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        if only is not None and name not in only:
            continue
        default = "required" if field.is_required() else _default(field.default)
        text = (field.description or "").replace("|", "\\|").replace("\n", " ")
        below = _models(field.annotation)
        kind = "mapping" if below else _kind(field.annotation)
        if name == "alpha":
            default = "by mode"
        rows.append(f"| `{prefix}{name}` | {kind} | {default} | {text} |")
        if below and nested:
            of_many = "NAME." if typing.get_origin(field.annotation) is dict else ""
            rows += _rows(below[0], f"{prefix}{name}.{of_many}")
    return rows


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the section models in an annotation; a mapping of plain values has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            "null" if argument is types.NoneType else _kind(argument) for argument in arguments
        )
    if origin is dict:
        return "mapping"
    if origin is tuple:
        return f"list of {len(arguments)}"
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    return _TYPES.get(annotation, str(annotation))


def _default(value: Any) -> str:
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return ""
    text = json.dumps(value)
    return f"`{text[1:-1] if isinstance(value, str) else text}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    CLUSTERS.write_text(clusters_page(CLUSTERS.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE} and the table of {CLUSTERS}", file=sys.stderr)
