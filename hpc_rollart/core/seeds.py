"""Seeds that depend on what they are for and on nothing else: not on order, process or Python version."""

from hashlib import blake2b


def derive_seed(seed: int, purpose: str, *path: int) -> int:
    """Hash a root seed, a purpose and a path of integers to a seed in [0, 2**63)."""
    text = "/".join((str(seed), purpose, *map(str, path)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def env_seed(seed: int, group: int) -> int:
    """Seed of the environment's reset, shared by all members and attempts of a group."""
    return derive_seed(seed, "env", group)


def sample_seed(seed: int, group: int, member: int, attempt: int) -> int:
    """Seed of the sampled tokens, one of its own for each trajectory."""
    return derive_seed(seed, "sample", group, member, attempt)
