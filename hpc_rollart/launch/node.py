"""What runs on each node of a Slurm job but the first: holds scratch directories and MPI's daemon.

Started by `agent.py` through srun, not by people: ``python -m hpc_rollart.launch.node SCRATCH NAME RUN_ID
COMMAND...``, where the command is mpirun's own for the node.

Slurm sends the signals of `scancel` and of preemption to all processes of a step. The daemon would end its
ranks at once on SIGTERM, in the middle of a write. So it runs with these signals blocked; it unblocks them in
the ranks, which take them for what they are, a request to stop in good order.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

from hpc_rollart.errors import UserError
from hpc_rollart.launch import scratch
from hpc_rollart.launch.mpirun import scratch_variables

_BLOCKED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT}
_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Hold the node until the command ends; returns its exit status."""
    base, name, run_id, command = Path(argv[0]), argv[1], argv[2], argv[3:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        with scratch.held(base, run_id, name) as paths:
            daemon = subprocess.Popen(
                # The words are mpirun's own, written for a shell as those of ssh are.
                ["/bin/sh", "-c", " ".join(command)],
                env=os.environ | scratch_variables(*paths),
                stdin=subprocess.DEVNULL,
                preexec_fn=_end_with_parent,
            )
            return daemon.wait()
    except UserError as error:
        print(f"{os.uname().nodename}: {error}", file=sys.stderr)
        return 2


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
