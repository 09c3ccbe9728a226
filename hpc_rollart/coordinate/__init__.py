"""The coordinator rank: drives the pure rules of `core/` with messages and a clock."""
