"""A config as text again: the resolved whole as YAML, and the schema for editors."""

import json

import yaml

from hpc_rollart.config.schema import RunConfig


class _Dumper(yaml.SafeDumper):
    """Indents lists under their key, which YAML leaves open and people expect."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def dump(config: RunConfig) -> str:
    """Return the whole config, defaults included, as YAML that `load` reads back to an equal config."""
    return yaml.dump(config.resolved(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def schema() -> str:
    """Return the JSON schema of a run's YAML, for editors that complete and check as one types."""
    return json.dumps(RunConfig.model_json_schema(), indent=2)
