"""Submitted jobs: asking the scheduler, and what became of a run."""
