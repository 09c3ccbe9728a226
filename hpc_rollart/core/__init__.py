"""The rules of a run, in pure Python: events and a time go in, decisions come out.

No MPI, no torch, no clock, no I/O and no global random state, so that the coordinator, the property
tests and the simulator all drive the very same code.
"""
