"""Slurm's words for why a job waits, in plain ones."""

# By prefix; the longest that fits is taken. Slurm has over a hundred, most of them limits.
_REASONS = {
    "Resources": "waits for nodes to become free",
    "Priority": "other jobs come first",
    "Nodes_required_for_job_are_DOWN": "the nodes it needs are down or reserved",
    "ReqNodeNotAvail": "the nodes it needs are down or reserved",
    "PartitionDown": "the partition is down; it starts when the site opens it again",
    "PartitionInactive": "the partition is closed; it starts when the site opens it again",
    "PartitionConfig": "asks for more than the partition allows, so it will never start: cancel it",
    "PartitionNodeLimit": "asks for more nodes than the partition allows, so it will never start: cancel it",
    "PartitionTimeLimit": "asks for more time than the partition allows, so it will never start: cancel it",
    "AccountNotAllowed": "the account may not use this partition: cancel it and use another",
    "InvalidAccount": "the account is not valid (any more): cancel it and use another",
    "InvalidQOS": "the QOS is not valid (any more): cancel it and use another",
    "QOSNotAllowed": "the QOS may not be used here: cancel it and use another",
    "QOS": "a limit of the QOS is reached; it starts when other jobs have ended",
    "Assoc": "a limit of your account is reached; it starts when other jobs have ended",
    "MaxJobs": "a limit of your account is reached; it starts when other jobs have ended",
    "BeginTime": "starts again in a moment: Slurm waits after a requeue",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for a job that failed, so it will never start: cancel it",
    "JobHeldUser": "is held: scontrol release lets it go on",
    "JobHeldAdmin": "is held by the site's staff; ask them",
    "JobHoldMaxRequeue": "was requeued too often and is held: scontrol release lets it go on",
    "launch_failed_requeued_held": "could not be started and is held: scontrol release tries again",
    "Licenses": "waits for licences",
    "Reservation": "waits for its reservation",
    "ReservationDeleted": "its reservation is gone: cancel it",
    "BadConstraints": "no node fits what it asks for, so it will never start: cancel it",
    "NodeDown": "a node of it is down",
    "Prolog": "its nodes are being prepared",
    "Cleaning": "is being cleaned up before it starts again",
    "Reboot": "its nodes are starting up",
    "PowerUp": "its nodes are starting up",
    "FrontEndDown": "the site's front end is down",
}  # fmt: skip


def explain_reason(reason: str) -> str:
    """Return the reason in plain words, or as Slurm has it where none are known."""
    word = reason.strip("() ").replace(" ", "_")
    known = [prefix for prefix in _REASONS if word.lower().startswith(prefix.lower())]
    return _REASONS[max(known, key=len)] if known else reason
