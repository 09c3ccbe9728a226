"""Trainer ranks: batches, objectives, optimisers and checkpoints."""
