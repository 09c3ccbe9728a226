"""Whether a run may go back into the queue, with its job or with another."""

from pathlib import Path

from hpc_rollart.config.cluster import Cluster
from hpc_rollart.config.schema import RunConfig
from hpc_rollart.jobs import book, events
from hpc_rollart.jobs.commands import SlurmError
from hpc_rollart.launch.allocation import Allocation, job_facts

REPLACED = "replaced"
GO_ON = "go on with hpc-rollart resubmit"


def forbidden(run_dir: Path, config: RunConfig, cluster: Cluster, restarts: int) -> str:
    """Return why the run is not to go back into the queue, whatever its job's state; or nothing."""
    limit = config.launch.max_requeues
    replaced = sum(event.event == REPLACED for event in events.newest_first(run_dir))
    if book.is_cancelled(run_dir):
        return f"cancelled; {GO_ON}"
    if not cluster.requeue:
        return f"the cluster's profile says requeue: false; {GO_ON}"
    if restarts + replaced >= limit:
        return f"it was requeued {limit} times (launch.max_requeues); {GO_ON}"
    return ""


def refusal(run_dir: Path, config: RunConfig, cluster: Cluster, allocation: Allocation) -> str:
    """Return why the run does not go back into the queue just now, or nothing if it does."""
    if problem := forbidden(run_dir, config, cluster, allocation.restarts):
        return problem
    try:
        state = job_facts(allocation.job_id).state
    except SlurmError as error:
        return f"{error}; {GO_ON}"
    if state != "RUNNING":
        # scancel: the user's will. Or Slurm requeues it already, then it comes back by itself.
        return f"Slurm has ended the job itself, or requeues it (it is {state or 'unknown'})"
    return ""
