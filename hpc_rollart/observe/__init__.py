"""What a run shows while it goes on: metrics, an event timeline, and its status."""
