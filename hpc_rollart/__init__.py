"""hpc_rollart: reinforcement learning of language-model agents as one batch job."""

__version__ = "0.1.0"
