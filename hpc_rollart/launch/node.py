"""What runs on each node of a Slurm job but the first: holds scratch directories and MPI's daemon.

Started by `agent.py` through srun, not by people: ``python -m hpc_rollart.launch.node SCRATCH NAME
COMMAND...``, where the command is mpirun's own for the node.

Slurm sends the signals of `scancel` and of preemption to all processes of a step. The ranks take them for
what they are, a request to stop in good order; the daemon, which would end the ranks, must not take them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from hpc_rollart.errors import UserError
from hpc_rollart.launch import scratch, shield
from hpc_rollart.launch.mpirun import scratch_variables
from hpc_rollart.launch.processes import end_with_parent

_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_BLOCKED = (signal.SIGTERM, signal.SIGINT)  # those that the daemon handles
_DAEMON = "prted"
_READY_S, _POLL_S = 30.0, 0.05


def main(argv: list[str]) -> int:
    """Hold the node until the command ends; returns its exit status."""
    base, name, command = Path(argv[0]), argv[1], argv[2:]
    for number in (*_IGNORED, *_BLOCKED):
        signal.signal(number, signal.SIG_IGN)  # the daemon inherits it, and installs its own for some
    try:
        # No run id: ranks of the run do not outlive their node's daemon, so that nothing is to be spared.
        with scratch.held(base, "", name) as paths:
            shell = subprocess.Popen(
                # The words are mpirun's own, written for a shell as those of ssh are.
                ["/bin/sh", "-c", " ".join(command)],
                env=os.environ | scratch_variables(*paths),
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: end_with_parent(signal.SIGKILL),
            )
            if not _shielded(shell) and shell.poll() is None:
                print(f"{os.uname().nodename}: SIGTERM will end MPI's daemon here, and its ranks", flush=True)
            return shell.wait()
    except UserError as error:
        print(f"{os.uname().nodename}: {error}", file=sys.stderr)
        return 2


def _shielded(shell: "subprocess.Popen[bytes]") -> bool:
    """Shield the daemon that the shell starts; returns whether that could be done."""
    end = time.monotonic() + _READY_S
    while shell.poll() is None and time.monotonic() < end:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(shell.pid).children(recursive=True):
                if process.name() == _DAEMON:
                    return shield.block_when_handled(process.pid, _BLOCKED, end - time.monotonic())
        time.sleep(_POLL_S)
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
