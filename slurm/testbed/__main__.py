"""``python3 -m slurm.testbed VERB``."""

import sys

from slurm.testbed.cli import main

sys.exit(main())
