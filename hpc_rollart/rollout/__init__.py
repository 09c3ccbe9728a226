"""Environment ranks: the episode loop, its worker processes, and turns as tokens."""
