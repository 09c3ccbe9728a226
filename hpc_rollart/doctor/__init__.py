"""Whether a run would start here: checks before and inside a job."""
