#!/usr/bin/env python3
"""Submit a run: `python slurm/submit.py CONF --cluster NAME`, with the options of `hpc-rollart submit`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # This checkout's program, wherever it is called from.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from hpc_rollart.cli import main

    sys.argv[1:1] = ["submit"]
    main()
