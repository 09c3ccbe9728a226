"""The verbs for a cluster as a person types them; what they do is tested in tests/launch and tests/slurm."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_cli import call
from tests.launch.fake_rank import write_status
from tests.launch.site import make_cluster, make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "conf.yaml"
    path.write_text(json.dumps(make_run(tmp_path).resolved()))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(json.dumps(make_cluster().model_dump(mode="json")))
    return path


@pytest.fixture
def run_dir(conf: Path, tmp_path: Path) -> Path:
    """A run directory that a run on this machine has left."""
    path = tmp_path / "run"
    path.mkdir()
    shutil.copy(conf, path / "config.yaml")
    (path / "manifest.json").write_text('{"run_id": "x"}')
    return path


def test_dry_run_prints_the_script_with_all_choices_and_makes_nothing(conf: Path, profile: Path) -> None:
    before = sorted(os.listdir(conf.parent))
    done = call(
        "submit", conf, "--cluster", profile, "-o", "components.trainer.cpus_per_rank=3",
        "-c", "requeue=false", "--account", "p1", "--qos", "fast", "--time", "90m",
        "--dir", conf.parent / "there", "--shared", "--dry-run",
        PATH="/nowhere",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in (
        "--account=p1", "--qos=fast", "--time=01:30:00", "--cpus-per-task=3", "--no-requeue",
        f"--output={conf.parent}/there/slurm/%j_0_log.out",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in done.stdout
    assert sorted(os.listdir(conf.parent)) == before


def test_submit_needs_no_torch_and_no_mpi(conf: Path, profile: Path) -> None:
    code = (
        "import sys; sys.argv = ['hpc-rollart', *sys.argv[1:]]\n"
        "from hpc_rollart.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'mpi4py', 'transformers'} & set(sys.modules)"
    )
    line = [sys.executable, "-c", code, "submit", conf, "--cluster", profile, "--shared", "--dry-run"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_script_of_the_checkout_takes_the_same_options(conf: Path, profile: Path) -> None:
    args = [conf, "--cluster", profile, "--shared", "--dry-run"]
    line = [sys.executable, ROOT / "slurm" / "submit.py", *args]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, call("submit", *args).stdout)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "error: no cluster: give --cluster NAME, or set `cluster` in the run's file\n"),
        (["--cluster", "nowhere"], "error: cluster: there is no profile 'nowhere'; profiles: "),
        (["--cluster", "PROFILE", "-c", "tiem=3h"], "unknown key; did you mean "),
        (["--cluster", "PROFILE", "--time", "soon"], "error: --time soon: expected a duration"),
        (["--cluster", "PROFILE"], "is below /tmp, which is local to each node; choose another with --dir"),
        (
            ["--cluster", "PROFILE", "--shared"],
            "error: no sbatch here: run this on a login node of the cluster\n",
        ),
    ],
)
def test_submit_that_cannot_be_is_exit_code_2_and_leaves_nothing(
    conf: Path, profile: Path, args: list[str], said: str
) -> None:
    args = [str(profile) if arg == "PROFILE" else arg for arg in args]
    done = call("submit", conf, *args, PATH="/nowhere")
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr
    assert not (conf.parent / "demo").exists()


@pytest.mark.parametrize(
    "args",
    [
        ["--account", "ODD"], ["--qos", "ODD"], ["--time", "ODD"], ["--dir", "/tmp/ODD"],
        ["--cluster", "ODD"],
        ["-o", "run.name=ODD"], ["-o", "ODD=1"], ["-c", "account=ODD"], ["-c", "ODD.x=1"],
        ["-c", 'setup=["\\ud800"]'], ["--dir", "LONG"], ["--account", "LONG"], ["--cluster", "LONG"],
        ["-c", "LONG=1"], ["-o", "model={path: LONG}"], ["--time", "LONG"],
    ],
)  # fmt: skip
def test_what_is_no_text_or_fills_the_screen_is_one_short_line(
    conf: Path, profile: Path, tmp_path: Path, args: list[str]
) -> None:
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o700)
    args = [arg.replace("ODD", "a\udcff").replace("LONG", "x" * 5000) for arg in args]
    done = call("submit", conf, "--cluster", profile, "--shared", *args, PATH=f"{tmp_path}:/bin")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert len(done.stderr) < 700, done.stderr


@pytest.mark.parametrize("verb", [["config", "show"], ["run"], ["submit", "--cluster", "testbed"]])
def test_file_whose_name_is_no_text_is_shown_by_its_bytes(tmp_path: Path, verb: list[str]) -> None:
    done = call(*verb, tmp_path / "a\udcff.yaml")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/a\\udcff.yaml: there is no such file\n")


@pytest.mark.parametrize("hangs", ["scontrol", "sbatch"])
def test_ctrl_c_while_slurm_is_asked_is_exit_code_130(
    conf: Path, profile: Path, tmp_path: Path, hangs: str
) -> None:
    asked = tmp_path / "asked"
    for name in ("scontrol", "sbatch", "squeue"):
        waits = f"touch {asked}; exec sleep 60" if name == hangs else "exit 0"
        (tmp_path / name).write_text(f"#!/bin/sh\n{waits}\n")
        (tmp_path / name).chmod(0o700)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("SLURM_CONF", None)
    line = [sys.executable, "-m", "hpc_rollart", "submit", conf, "--cluster", profile, "--shared"]
    process = subprocess.Popen(
        line, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not asked.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the commands too
        _, said = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, "Traceback" in said) == (130, False)
    # sbatch may have sent the job off before it died: then the directory is kept for it.
    assert (conf.parent / "demo").exists() == ("interrupted while sbatch ran" in said) == (hangs == "sbatch")


def test_cluster_of_the_run_is_used_when_none_is_given(conf: Path, profile: Path) -> None:
    done = call("submit", conf, "-o", f"cluster={profile}", "--shared", "--dry-run")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", ["cancel", "resubmit"])
def test_run_without_a_job_is_told_so(run_dir: Path, verb: str) -> None:
    done = call(verb, run_dir)
    assert (done.returncode, done.stderr) == (2, f"error: {run_dir}: this run was never submitted to Slurm\n")


def test_status_and_logs_work_for_a_run_of_this_machine_too(run_dir: Path) -> None:
    write_status(run_dir, state="failed", step=2, steps=5, message="rank 3: out of memory")
    done = call("status", run_dir)
    assert done.returncode == 3
    assert "rank 3: out of memory" in done.stdout and "2 of 5" in done.stdout
    status = json.loads(call("status", run_dir, "--json").stdout)
    assert (status["verdict"], status["step"], status["job"]) == ("failed", 2, None)
    done = call("logs", run_dir)
    assert (done.returncode, done.stdout) == (2, "")
    (run_dir / "logs" / "0").mkdir(parents=True)
    (run_dir / "logs" / "0" / "env-20.log").write_bytes(b"a\n\xff\nb\n")
    line = [sys.executable, "-m", "hpc_rollart", "logs", run_dir, "--rank", "20", "-n", "2"]
    shown = subprocess.run(line, capture_output=True, timeout=60, check=True)
    assert shown.stdout == b"\xff\nb\n"


def test_run_that_is_done_or_goes_on_is_not_resumed(run_dir: Path) -> None:
    write_status(run_dir, state="done")
    done = call("resume", run_dir)
    assert (done.returncode, "the run is done" in done.stderr) == (2, True)
    write_status(run_dir, state="running", t=time.time())
    done = call("resume", run_dir)
    assert (done.returncode, "it goes on already" in done.stderr) == (2, True)
