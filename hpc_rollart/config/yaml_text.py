"""YAML as a run's file may use it: numbers like 1e-5, no key twice, and the line of every key."""

import re
from typing import Any

import yaml

from hpc_rollart.config.problem import Path


def _error(problem: str, node: yaml.Node) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


class _Loader(yaml.SafeLoader):
    """Safe loader that refuses duplicate keys and reads `1e-5` as a number, as YAML 1.2 does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _error(f"key {key!r} is not text", key_node)
            if key in seen:
                raise _error(f"key {key!r} stands twice", key_node)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+0123456789."),
)


class Document:
    """Parsed YAML text and where each of its keys stands.

    Raises
    ------
    yaml.YAMLError
        The text is no YAML, a key stands twice, or a key is not text.
    """

    def __init__(self, text: str) -> None:
        loader = _Loader(text)
        try:
            self._root = loader.get_single_node()
            self.data: Any = None if self._root is None else loader.construct_document(self._root)
        finally:
            loader.dispose()

    def line(self, path: Path) -> int | None:
        """Return the line (from 1) of the deepest key of `path` that the text has, or None."""
        node, found = self._root, None
        for key in path:
            if isinstance(node, yaml.MappingNode):
                pair = next(((k, v) for k, v in node.value if k.value == key), None)
                if pair is None:
                    break
                found, node = pair[0].start_mark.line + 1, pair[1]
            elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
                node = node.value[key]
                found = node.start_mark.line + 1
            else:
                break
        return found


def parse(text: str) -> Any:
    """Return the data of YAML `text`; raises `yaml.YAMLError`."""
    return Document(text).data


def syntax_problem(error: yaml.YAMLError) -> tuple[int | None, str]:
    """Return the line (from 1) and the one-line reason of a YAML error."""
    mark = getattr(error, "problem_mark", None)
    reason = getattr(error, "problem", None) or str(error).splitlines()[0]
    return (None if mark is None else mark.line + 1), str(reason)
