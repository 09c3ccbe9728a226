"""A run's YAML: its schema, loading with readable errors, and the rank layout that it implies."""

from hpc_rollart.config.load import ConfigError, load, load_resolved
from hpc_rollart.config.schema import RunConfig

__all__ = ["ConfigError", "RunConfig", "load", "load_resolved"]
