"""Environments that talk in text and run on CPU nodes, and adapters to public suites.

Nothing here knows MPI, torch or hpc_rollart; a suite is imported only when its environment is made.
"""

from envs_cpu.api import EnvConfigError, Step, TextEnv
from envs_cpu.registry import check_env, make

__all__ = ["EnvConfigError", "Step", "TextEnv", "check_env", "make"]
