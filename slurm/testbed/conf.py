"""The files that a testbed writes for Slurm and for the nodes."""

from __future__ import annotations

import shlex

from slurm.testbed.settings import CPUS, GPUS, MEMORY_MB, Settings

SPOOL = "/var/spool/slurmd"
# Seconds that a job of partition `low` has between SIGTERM and its end when it is preempted.
GRACE_S = 30
# How long a credential is good for. A requeued job waits that long and a second more before it starts again;
# Slurm's default makes that two minutes. 5 is the least that Slurm takes: below it silently uses the default.
CREDENTIAL_S = 5


def slurm_conf(settings: Settings) -> str:
    d = settings.dir
    lines = [
        "ClusterName=testbed",
        f"SlurmctldHost=head({settings.head_address})",
        # One address only, so that two testbeds may use the same port.
        "CommunicationParameters=NoCtldInAddrAny",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={settings.socket},cred_expire={CREDENTIAL_S}",
        f"StateSaveLocation={d}/state",
        f"SlurmctldPidFile={d}/run/slurmctld.pid",
        f"SlurmctldLogFile={d}/log/slurmctld.log",
        f"SlurmdPidFile={SPOOL}/slurmd.pid",
        f"SlurmdSpoolDir={SPOOL}",
        f"SlurmdLogFile={d}/log/slurmd-%n.log",
        "SlurmdParameters=config_overrides",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "GresTypes=gpu",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # With no --mem, jobs share a node by their CPUs.
        f"DefMemPerCPU={MEMORY_MB // CPUS}",
        "SchedulerType=sched/backfill",
        # Only the backfill scheduler starts heterogeneous jobs.
        "SchedulerParameters=bf_interval=1,bf_hetjob_immediate,bf_hetjob_prio=min,sched_interval=2,"
        "sched_min_interval=100000,batch_sched_delay=0",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "JobRequeue=1",
        f"FirstJobId={settings.starts * 1000 + 1}",
        "MinJobAge=3600",
        "KillWait=10",
        "OverTimeLimit=0",
        "InactiveLimit=0",
        "CompleteWait=0",
        "SlurmctldTimeout=30",
        f"SlurmdTimeout={settings.down_after_s}",
        # With all cores busy a batch script may take its time to start; a node is not given up for that.
        "BatchStartTimeout=20",
        "ReturnToService=2",
    ]
    for node in settings.nodes:
        gres = f" Gres=gpu:{node.gpu}:{GPUS}" if node.gpu else ""
        lines.append(
            f"NodeName={node.name} NodeAddr={settings.address(node)} CPUs={CPUS} Boards=1 SocketsPerBoard=1 "
            f"CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory={MEMORY_MB}{gres} State=UNKNOWN"
        )
    limits = "MaxTime=1-00:00:00 State=UP"
    for name, nodes in settings.partitions.items():
        members = ",".join(node.name for node in nodes)
        lines.append(f"PartitionName={name} Nodes={members} PriorityTier=10 PreemptMode=OFF {limits}")
    everyone = ",".join(node.name for node in settings.nodes)
    lines.append(
        f"PartitionName=low Nodes={everyone} PriorityTier=1 PreemptMode=REQUEUE GraceTime={GRACE_S} {limits}"
    )
    lines.append(
        f"PartitionName=broken Nodes={settings.nodes[-1].name} PriorityTier=10 PreemptMode=OFF "
        "MaxTime=1-00:00:00 State=DOWN"
    )
    return "\n".join(lines) + "\n"


def gres_conf(settings: Settings) -> str:
    lines = ["AutoDetect=off"]
    for node in settings.nodes:
        if node.gpu:
            files = f"{settings.dir}/dev/gpu[0-{GPUS - 1}]"
            lines.append(f"NodeName={node.name} Name=gpu Type={node.gpu} File={files}")
    return "\n".join(lines) + "\n"


def cgroup_conf() -> str:
    # No plugin that is used here touches cgroups, but slurmd loads one anyway. Left to find out by itself, it
    # ends on machines with both versions mounted and wants systemd on those with version 2.
    return "CgroupPlugin=cgroup/v1\n"


def hosts(settings: Settings) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{settings.head_address} head"]
    lines += [f"{settings.address(node)} {node.name}" for node in settings.nodes]
    return "\n".join(lines) + "\n"


def head_script(settings: Settings) -> str:
    """The shell script that becomes ``slurmctld``, in mount and UTS namespaces of its own."""
    return "\n".join(
        [
            "set -e",
            "hostname head",
            f"mount --bind {settings.dir}/etc/hosts /etc/hosts",
            f"exec slurmctld -D -f {settings.conf}",
            "",
        ]
    )


def node_script(settings: Settings, name: str) -> str:
    """The shell script that becomes a node's ``slurmd``, in the node's namespaces.

    The new ``/tmp`` is put together at the spool's place and moved when all that stays visible is in it,
    since nothing of the old one can be reached once it is covered.
    """
    lines = [
        "set -e",
        f"hostname {name}",
        f"mkdir -p {SPOOL}",
        f"mount -t tmpfs -o mode=1777 tmpfs {SPOOL}",
    ]
    for share in settings.shares:
        inside = shlex.quote(SPOOL + share.removeprefix("/tmp"))
        lines += [f"mkdir -p {inside}", f"mount --rbind {shlex.quote(share)} {inside}"]
    lines += [
        f"mount --move {SPOOL} /tmp",
        f"mount -t tmpfs -o mode=0755 tmpfs {SPOOL}",
        "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
        f"mount --bind {settings.dir}/etc/hosts /etc/hosts",
        # Commands on a node find the cluster without SLURM_CONF, as on a real one.
        f"if [ -d /etc/slurm ]; then mount --bind {settings.dir}/etc /etc/slurm; fi",
        "cd /",
        f"exec slurmd -D -N {name} -f {settings.conf}",
        "",
    ]
    return "\n".join(lines)
