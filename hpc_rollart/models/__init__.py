"""Where a run's policy comes from: a folder, a tiny model made on the spot, or a real one from PyPI."""
