"""What one learns from a run directory afterwards: report, audit, overlap."""
