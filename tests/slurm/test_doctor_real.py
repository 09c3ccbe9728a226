"""The doctor on a real Slurm: by a short job, with a profile that promises too much, inside a job."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import Testbed

pytestmark = pytest.mark.timeout(600)
DOCTOR = (sys.executable, "-m", "hpc_rollart", "doctor")
ROOT = Path(__file__).parents[2]
LINKS = {"env - generator", "env - trainer", "trainer - generator", "coordinator - all"}


@pytest.fixture
def place(testbed: Testbed) -> Iterator[Path]:
    """A directory that all nodes see, with a config of four components in it."""
    folder = Path(tempfile.mkdtemp(prefix="doctor-", dir=testbed.shared))
    (folder / "small.yaml").write_text(
        f"""\
run: {{name: small, steps: 2, dir: {folder}/run}}
model: {{builtin: tiny, max_context: 256}}
algorithm: {{type: grpo}}
tasks: [{{name: lake, env: frozen-lake}}]
components:
  trainer: {{role: trainer, gpus_per_rank: 1}}
  generate-a: {{role: generator, pool: a, gpus_per_rank: 1}}
  generate-b: {{role: generator, pool: b, gpus_per_rank: 1}}
  env: {{role: env, ranks_per_node: 2}}
"""
    )
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def examine(testbed: Testbed, place: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Run the command for the testbed and return its exit code and findings."""
    done = testbed.run(
        *DOCTOR, str(place / "small.yaml"), "--cluster", "testbed", "--shared", "--json", "--wait", "8m",
        *options, timeout=580,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def of(findings: list[dict[str, Any]], check: str) -> list[dict[str, Any]]:
    """Return the findings of one check."""
    return [finding for finding in findings if finding["check"] == check]


def test_a_run_of_four_components_would_start_and_nothing_is_left(testbed: Testbed, place: Path) -> None:
    code, findings = examine(testbed, place)
    # How busy the machine is that plays all nodes is no fault of theirs.
    wrong = [f for f in findings if f["level"] in ("warn", "fail") and f["check"] not in LINKS]
    assert (code, wrong) == (0, [])
    assert {f["check"] for f in findings} >= LINKS | {"GPUs", "network", "clock", "packages", "model"}
    hosts = of(findings, "job")[0]["text"]
    assert hosts == "4 nodes: h100-1, h20-1, h20-2, cpu-1" or "cpu-2" in hosts
    assert of(findings, "MPI world")[0]["where"] == "4 hosts"
    assert len(of(findings, "GPUs of ranks")) == 4  # three components, and all that have none
    assert of(findings, "NCCL")[0] | {"where": ""} == {
        "check": "NCCL", "where": "", "level": "skipped", "text": "no GPU: not checked", "mend": "",
    }  # fmt: skip
    assert [path.name for path in place.iterdir()] == ["small.yaml"]
    assert "doctor-small" not in testbed.run("squeue", "--format=%j").stdout


def test_gpus_that_the_profile_promises_and_slurm_does_not_give_are_named_with_the_node(
    testbed: Testbed, place: Path
) -> None:
    # Whole nodes are asked for without a number of GPUs, which the site is trusted to add.
    promise = [
        "partitions.h20.gres=null",
        "partitions.h20.whole_nodes=true",
        "partitions.h20.gpus_per_node=4",
    ]
    options = [word for text in promise for word in ("-c", text)]
    code, findings = examine(testbed, place, *options, "-o", "components.generate-a.gpus_per_rank=3")
    assert code == 2
    failed = [f for f in of(findings, "GPUs") if f["level"] == "fail"]
    assert failed and {f["where"] for f in failed} <= {"h20-1", "h20-2"}
    assert any("3 GPUs promised" in f["text"] for f in failed)
    assert all("gpus_per_node" in f["mend"] for f in failed)
    kept = of(findings, "kept")[0]["where"]
    assert list(Path(kept, "logs").iterdir()) and list(Path(kept, "slurm").glob("*.out"))


def test_what_slurm_refuses_is_told_in_its_words_and_nothing_is_left(testbed: Testbed, place: Path) -> None:
    code, findings = examine(testbed, place, "-c", "partitions.h20.partition=h21")
    assert code == 2
    assert any("no partition h21" in f["text"] for f in of(findings, "partitions"))
    assert [path.name for path in place.iterdir()] == ["small.yaml"]


def test_ctrl_c_cancels_the_job_and_leaves_nothing(testbed: Testbed, place: Path) -> None:
    line = [*DOCTOR, str(place / "small.yaml"), "--cluster", "testbed", "--shared"]
    with subprocess.Popen(line, env=testbed.env, cwd=ROOT, stderr=subprocess.PIPE, text=True) as command:
        assert command.stderr is not None
        number = next(text.split()[1] for text in command.stderr if text.startswith("job "))
        command.send_signal(signal.SIGINT)
        rest = command.stderr.read()
        assert command.wait(120) == 130, rest
    assert "Traceback" not in rest
    states = testbed.run("squeue", "--noheader", f"--jobs={number}", "--states=all", "--format=%T").stdout
    assert set(states.split()) <= {"CANCELLED", "COMPLETING"}, states
    assert [path.name for path in place.iterdir()] == ["small.yaml"]


def test_inside_a_job_that_fits_its_own_nodes_are_examined(testbed: Testbed, place: Path) -> None:
    (place / "job.sh").write_text(
        f"""\
#!/bin/bash
#SBATCH -p h100 -N1 -n1 --gres=gpu:h100:1 --time=5 -o {place}/log
#SBATCH hetjob
#SBATCH -p h20 -N1 -n1 --gres=gpu:h20:1
#SBATCH hetjob
#SBATCH -p cpu -N1 -n2
cd {ROOT}
exec {sys.executable} -m hpc_rollart doctor {place}/small.yaml --cluster testbed --json \
  -o 'components={{trainer: {{role: trainer, gpus_per_rank: 1}}, generate: {{role: generator}}, \
env: {{role: env, ranks_per_node: 2}}}}' >{place}/found.json
"""
    )
    line = ["sbatch", "--wait", "--parsable", str(place / "job.sh")]
    with subprocess.Popen(line, env=testbed.env, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        number = job.stdout.readline().strip()
        try:
            code = job.wait(500)
        except BaseException:
            testbed.run("scancel", number)
            job.kill()
            raise
    assert code == 0, (place / "log").read_text()
    findings = json.loads((place / "found.json").read_text())["findings"]
    assert of(findings, "job")[0]["where"] == number.split("+")[0]
    assert [f for f in findings if f["level"] == "fail"] == []
    assert of(findings, "MPI world")[0]["where"] == "3 hosts"
    assert not list(place.glob(".rollart-doctor-*"))
