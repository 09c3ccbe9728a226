"""The order of the tests."""

import signal
from pathlib import Path

import pytest

SLURM = Path(__file__).parent / "slurm"


def pytest_configure() -> None:
    """Have what is tested take Ctrl-C, though a shell that starts this in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests in Slurm first: they wait most, and the last to start would be waited for."""
    items.sort(key=lambda item: SLURM not in item.path.parents)
