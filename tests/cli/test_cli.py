"""The command as a person types it: exit codes, one-line errors, quick answers."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_rollart import cli
from hpc_rollart.errors import UserError
from hpc_rollart.launch import local
from tests.launch.conftest import make_config
from tests.launch.fake_rank import write_status


def call(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `hpc-rollart` and return what it said."""
    line = [sys.executable, "-m", "hpc_rollart", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env=os.environ | env, check=False)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    config = make_config(tmp_path).resolved()
    config["tasks"][0]["env"] = "frozen-lake"
    del config["schedule"]
    path.write_text(json.dumps(config))  # JSON is YAML
    return path


def test_version_needs_neither_torch_nor_mpi_nor_pydantic() -> None:
    code = (
        "import sys; sys.argv = ['hpc-rollart', '--version']\n"
        "from hpc_rollart.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'torch', 'mpi4py', 'pydantic', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    version, modules = done.stdout.splitlines()
    assert version.startswith("hpc-rollart 0.")
    assert modules == "[]"


def test_checking_a_config_needs_neither_torch_nor_mpi(conf: Path) -> None:
    code = (
        "import sys; from hpc_rollart.config import load; load(sys.argv[1]);"
        "assert not {'torch', 'mpi4py', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(conf)], timeout=60, check=True)


def test_config_show_prints_the_resolved_whole(conf: Path) -> None:
    done = call("config", "show", conf, "-o", "run.steps=7", "-o", "schedule.mode=sync")
    assert done.returncode == 0
    assert "steps: 7\n" in done.stdout
    assert "alpha: 0\n" in done.stdout


def test_config_schema_is_json_schema_with_a_description_of_every_section() -> None:
    done = call("config", "schema")
    schema = json.loads(done.stdout)
    assert all(section["description"] for section in schema["$defs"].values())
    assert schema["$defs"]["Grpo"]["properties"]["group_size"]["description"]


@pytest.mark.parametrize("verb", [["config", "show"], ["run"], ["model", "build"], ["submit"]])
def test_wrong_config_is_exit_code_2_with_one_line_a_problem(conf: Path, verb: list[str]) -> None:
    done = call(*verb, conf, "-o", "run.stepz=3")
    assert done.returncode == 2
    assert done.stderr == "error: -o run.stepz=3: run.stepz: unknown key; did you mean run.steps?\n"
    assert done.stdout == ""


@pytest.mark.parametrize(
    "verb", ["report", "timeline", "audit", "watch", "resume", "resubmit", "status", "logs", "cancel"]
)
def test_directory_that_is_no_run_is_exit_code_2(tmp_path: Path, verb: str) -> None:
    done = call(verb, tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {tmp_path}: is no run directory (it has no config.yaml)\n",
    )
    done = call(verb, tmp_path / "gone")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'gone'}: there is no such directory\n")


def test_a_run_directory_of_somebody_else_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be read: Permission denied"):
        cli._run_dir(tmp_path)


@pytest.mark.parametrize("args", [["bogus"], ["run"], ["run", "--bogus", "x"], []])
def test_wrong_usage_is_exit_code_2_without_a_traceback(args: list[str]) -> None:
    done = call(*args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_run_refuses_a_directory_that_holds_another_run(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text("")
    done = call("run", conf, "--dir", tmp_path / "old")
    assert done.returncode == 2
    assert f"{tmp_path / 'old'} holds another run; choose a new one with --dir" in done.stderr
    assert os.listdir(tmp_path / "old") == ["config.yaml"]


def test_run_directory_named_like_a_number_is_text(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("run", conf, "--dir", tmp_path / "file" / "7")
    assert (done.returncode, "is not a directory" in done.stderr) == (2, True)


def test_watch_of_a_finished_run_shows_its_steps_and_ends(conf: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(conf.read_text())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward": {"count": 0.5}, "reward_mean": 0.5}\n')
    write_status(tmp_path, state="done", step=1, steps=1)
    done = call("watch", tmp_path)
    assert done.returncode == 0
    assert "1/1    0.500" in done.stdout


def test_completion_script_is_offered() -> None:
    done = call("--show-completion", "bash")
    assert done.returncode == 0
    assert "hpc-rollart" in done.stdout


def test_a_run_directory_stays_once_ranks_may_have_written_to_it(
    conf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(local, "run_world", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(KeyboardInterrupt):
            cli.run(conf, [f"model={{path: {tmp_path}/model}}"], str(tmp_path / "run"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (tmp_path / "run" / "config.yaml").is_file()
