"""The order of the tests."""

from pathlib import Path

import pytest

SLURM = Path(__file__).parent / "slurm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests in Slurm first: they wait most, and the last to start would be waited for."""
    items.sort(key=lambda item: SLURM not in item.path.parents)
