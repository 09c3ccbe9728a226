"""The rules need nothing but the standard library, no clock and no randomness of their own."""

import ast
import sys
from pathlib import Path

import hpc_rollart.core

ALLOWED = {"collections", "dataclasses", "enum", "hashlib", "heapq", "math", "typing"}


def test_core_imports_only_pure_modules_of_the_standard_library() -> None:
    assert sys.stdlib_module_names >= ALLOWED
    for path in Path(hpc_rollart.core.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            else:
                continue
            assert {module.split(".")[0] for module in modules} <= ALLOWED, path.name
