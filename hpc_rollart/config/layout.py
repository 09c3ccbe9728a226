"""Which rank is what: the one place that turns `components` into world ranks and pools.

Blocks are contiguous and in the order of the file, which is also the order in which they are launched.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpc_rollart.config.schema import RunConfig


@dataclass(frozen=True)
class Block:
    """The world ranks `first` to `first + count - 1`, all of one component."""

    component: str
    role: Literal["trainer", "generator", "env"]
    first: int
    count: int
    cpus_per_rank: int

    @property
    def ranks(self) -> range:
        """The block's world ranks."""
        return range(self.first, self.first + self.count)


def blocks(config: RunConfig) -> list[Block]:
    """Return one block for each component, in rank order."""
    out: list[Block] = []
    first = 0
    for name, part in config.components.items():
        out.append(Block(name, part.role, first, part.ranks, part.cpus_per_rank))
        first += part.ranks
    return out


def world_size(config: RunConfig) -> int:
    """Return the number of ranks of the run."""
    return sum(part.ranks for part in config.components.values())


def pools(config: RunConfig) -> list[str]:
    """Return the pools' names; a pool's index here is its number in messages and shards."""
    return list(dict.fromkeys(p.pool for p in config.components.values() if p.role == "generator"))


def pool_of(config: RunConfig, rank: int) -> int:
    """Return the pool index of generator `rank`."""
    block = next(block for block in blocks(config) if rank in block.ranks)
    part = config.components[block.component]
    if part.role != "generator":
        raise ValueError(f"rank {rank} ({block.component}) is no generator and has no pool")
    return pools(config).index(part.pool)


def with_nodes(config: RunConfig, nodes: Mapping[str, int]) -> RunConfig:
    """Return the config with other numbers of nodes, as for an attempt on the nodes that are left."""
    parts = {
        name: part.model_copy(update={"nodes": nodes.get(name, part.nodes)})
        for name, part in config.components.items()
    }
    return config.model_copy(update={"components": parts})
