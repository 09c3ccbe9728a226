"""A real Slurm cluster of several hosts on one machine, to submit to and to break.

Every node is a network, mount and UTS namespace with a ``slurmd`` of its own. ``python3 -m slurm.testbed up``
starts it; ``docs/testbed.md`` says the rest. Only the standard library is used.
"""
