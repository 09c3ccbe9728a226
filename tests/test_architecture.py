"""The rule of dependency of docs/architecture.md: which package may import which.

`role.py` files put a rank together, so they may know the tools they use; everything else of a package knows
only what is listed here. Nobody but each other may import `launch`, `jobs`, `doctor` or `cli`, and no role
another role.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hpc_rollart

ROOT = Path(hpc_rollart.__file__).parent
PLAIN = {"errors", "messages", "folders"}
TOOLS = {"config", "core", "fabric", "models", "observe", "rank", "reward", "store", "weights"}
MAY_KNOW = {
    "analysis": {"observe", "store"},
    "config": set(),
    "core": set(),
    "fabric": set(),
    "generate": set(),
    "models": set(),
    "observe": set(),
    "reward": set(),
    "rollout": set(),
    "store": set(),
    "train": {"models", "store"},
    "weights": set(),
    "rank": {"config", "fabric", "observe"},
    "coordinate": TOOLS,  # all of it is a role
}
EVERYBODY = {"__init__", "__main__", "cli", "doctor", "jobs", "launch"}


def imported(path: Path) -> set[str]:
    """The first name behind `hpc_rollart` of whatever a file imports from it."""
    names = set()
    inside = path.relative_to(ROOT).parts[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and inside == "core", "imports that leave the package are absolute"
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hpc_rollart":
            parts = (node.module or "").split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.split(".")[1] for alias in node.names if alias.name.startswith("hpc_rollart.")
            }
    return names - {"__version__"}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may_know(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if package in EVERYBODY | PLAIN:
        assert package in EVERYBODY or not imported(path) - PLAIN
        return
    allowed = MAY_KNOW[package] | PLAIN | {package}
    if path.name == "role.py":
        allowed |= TOOLS
    assert imported(path) <= allowed


@pytest.mark.parametrize("package", ["config", "core", "store", "analysis"])
def test_offline_packages_import_without_torch_or_mpi(package: str) -> None:
    modules = [
        ".".join(("hpc_rollart", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sorted((ROOT / package).glob("*.py"))
        if path.name != "__init__.py"
    ]
    script = (
        f"import sys, {', '.join(modules)}\n"
        "loaded = {'torch', 'mpi4py', 'transformers', 'vllm'} & set(sys.modules)\n"
        "sys.exit(f'imported {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
