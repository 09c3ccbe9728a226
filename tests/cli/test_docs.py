"""What the documentation promises is there: commands, configs, pages, links."""

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from hpc_rollart.cli import app
from hpc_rollart.config import load
from hpc_rollart.config.cluster import Cluster, cluster_names
from hpc_rollart.config.schema import RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONFS = sorted((ROOT / "conf").glob("*.yaml"))


def fenced(language: str) -> list[tuple[str, str]]:
    """Return (page, text) of every fenced block of `language`."""
    blocks = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return [(page.name, text) for page in PAGES for text in blocks.findall(page.read_text())]


def commands(program: str) -> list[str]:
    """Return every documented command line that starts with `program`."""
    found = [line for _, text in fenced("bash") for line in text.splitlines()]
    return sorted({line for line in found if line.split()[:1] == [program]})


@pytest.mark.parametrize("path", CONFS, ids=lambda path: path.name)
def test_shipped_config_loads_with_documented_names(path: Path) -> None:
    config = load(path)
    assert config.run.dir.startswith("runs/")


def test_shipped_configs_of_the_readme_are_there() -> None:
    assert {"quickstart.yaml", "smollm2.yaml"} <= {path.name for path in CONFS}


@pytest.mark.parametrize("line", commands("hpc-rollart"))
def test_documented_command_parses(line: str) -> None:
    args = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    context = command.make_context("hpc-rollart", args)
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    assert all((ROOT / arg).exists() for arg in args if arg.startswith("conf/"))


@pytest.mark.parametrize("line", commands("make"))
def test_documented_make_target_exists(line: str) -> None:
    target = shlex.split(line)[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE))
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert set(re.findall(r"^  make ([\w-]+) ", shown.stdout, re.MULTILINE)) == set(phony.split())


def test_submitting_nothing_is_refused_with_an_example() -> None:
    done = subprocess.run(
        ["make", "submit"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "make submit CONF=conf/quickstart.yaml CLUSTER=testbed" in done.stderr


@pytest.fixture(scope="module")
def make_configuration() -> Any:
    script = ROOT / "docs" / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_is_what_the_schema_says(make_configuration: Any) -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == make_configuration.page(), "run make docs"


def test_clusters_page_has_every_key_of_a_profile(make_configuration: Any) -> None:
    text = (ROOT / "docs" / "clusters.md").read_text()
    assert text == make_configuration.clusters_page(text), "run make docs"
    assert {f"| `{key}` |" for key in Cluster.model_fields} <= set(
        re.findall(r"^\| `\w+` \|", text, re.MULTILINE)
    )


def test_clusters_page_lists_every_shipped_profile() -> None:
    shipped = {path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml")}
    assert shipped <= set(cluster_names())
    text = (
        (ROOT / "docs" / "clusters.md").read_text().partition("## Shipped profiles")[2].partition("\n## ")[0]
    )
    assert set(re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)) == shipped


def test_every_field_of_the_schema_is_described() -> None:
    def undescribed(schema: dict[str, Any]) -> list[str]:
        return [
            f"{name}.{key}"
            for name, model in schema["$defs"].items()
            for key, field in model["properties"].items()
            if "description" not in field and "$ref" not in field
        ]

    assert undescribed(RunConfig.model_json_schema()) == []
    assert undescribed(Cluster.model_json_schema()) == []


@pytest.mark.parametrize(("page", "text"), fenced("yaml"), ids=lambda value: value[:20])
def test_yaml_of_the_pages_is_yaml_of_known_keys(page: str, text: str) -> None:
    model = Cluster if page == "clusters.md" else RunConfig
    assert set(yaml.safe_load(text)) <= set(model.model_fields), page


@pytest.mark.parametrize(("page", "text"), fenced("python"), ids=lambda value: value[:20])
def test_python_of_the_pages_compiles(page: str, text: str) -> None:
    compile(text, page, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
