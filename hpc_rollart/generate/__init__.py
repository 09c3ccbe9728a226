"""Generator ranks: the engine protocol and the engines behind it."""
