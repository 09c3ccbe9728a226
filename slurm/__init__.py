"""Tools around Slurm that a developer of the project needs; no part of the installed package."""
