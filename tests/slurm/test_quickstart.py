"""The quickstart over two types of GPU nodes and CPU nodes, in a job whose time limit ends it half way."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from hpc_rollart.analysis.recount import audit
from hpc_rollart.launch.view import tenths
from tests.slurm.lifecycle import ROOT, folder, submit

if TYPE_CHECKING:
    from tests.slurm.conftest import Testbed


@pytest.mark.timeout(1200)
def test_the_quickstart_learns_in_slurm_as_on_one_machine_over_a_time_limit(
    testbed: Testbed, quickstart_model: str
) -> None:
    here = folder(testbed, "quickstart")
    gpus = [f"-ocomponents.{name}.gpus_per_rank=1" for name in ("trainer", "generate-compute")]
    job = submit(
        testbed,
        ROOT / "conf" / "quickstart.yaml",
        here / "run",
        "--time",
        "3m",
        # A fast machine needs no two minutes for the whole run.
        "-olaunch.stop_lead_s=100",
        *gpus,
    )
    job.finish(900)
    lines = job.metrics()
    assert [line["step"] for line in lines] == list(range(110))
    assert len(job.events("requeued")) >= 1, "the time limit never came"
    assert all("the job ends in" in e["message"] or "USR2" in e["message"] for e in job.events("requeued"))
    assert not job.events("attempt failed")
    for task in ("frozen-lake", "arithmetic"):
        first, last = tenths([line["reward"][task] for line in lines if line["reward"].get(task) is not None])  # type: ignore[misc]
        assert last - first >= 0.25, (task, first, last)  # what the quickstart shows on one machine
    assert max(line["staleness_max"] for line in lines) <= 1
    assert (job.run / "report.html").is_file()
    for check in audit(job.run).checks:
        assert not check.problems, check
    shutil.rmtree(here)
