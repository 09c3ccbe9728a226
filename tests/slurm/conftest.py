"""A real Slurm for the tests: the machine's testbed, shared by all of them, or one of a test's own."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from slurm.testbed import cli, settings

ROOT = Path(__file__).parents[2]
MakeTestbed = Callable[..., "Testbed"]


class Testbed:
    """A testbed as tests see it.

    Parameters
    ----------
    directory
        The directory of its state.
    """

    __test__ = False

    def __init__(self, directory: Path) -> None:
        self.dir = directory
        self.shared = directory / "shared"
        # Nothing of a job that the tests themselves may run in.
        outer = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
        self.env = outer | {
            "SLURM_CONF": str(directory / "etc" / "slurm.conf"),
            "ROLLART_TESTBED_DIR": str(directory),
        }

    def run(self, *command: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command that finds this cluster; it may fail."""
        return subprocess.run(
            command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=timeout
        )

    def verb(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a verb of the testbed's command; it may fail."""
        return self.run(sys.executable, "-m", "slurm.testbed", *arguments, timeout=240)

    def must(self, *arguments: str) -> str:
        """Run a verb that has to succeed and return what it says."""
        done = self.verb(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def node(self, verb: str, name: str) -> str:
        """Do something to a node: kill, start, pause, resume, cut or mend."""
        return self.must(verb, name)


def require_slurm() -> None:
    lack = cli.missing()
    if lack and (os.environ.get("CI") or os.environ.get("ROLLART_REQUIRE_SLURM") == "1"):
        pytest.fail(lack, pytrace=False)
    if lack:
        pytest.skip(lack)


@pytest.fixture(scope="session")
def testbed() -> Iterator[Testbed]:
    """The machine's testbed, brought up if it is not, and then taken down by the last process that uses it.

    Tests may run in several processes. Each that uses the testbed holds a shared lock until it ends; whoever
    gets that lock for itself alone is the first or the last. Only the first mends what it finds broken, for
    later it may be another test that has broken it. A process that comes after the last one starts it again.
    """
    require_slurm()
    found = Testbed(Path(os.environ.get("ROLLART_TESTBED_DIR") or settings.DEFAULT_DIR))
    found.dir.mkdir(parents=True, exist_ok=True)
    ours = found.dir / "testbed.started-by-tests"
    with (found.dir / "testbed.users").open("a") as users:
        alone = _alone(users)
        if not alone:
            fcntl.flock(users, fcntl.LOCK_SH)
        is_up = found.verb("status").stdout.startswith("node ")
        if not is_up:
            ours.touch()
        if alone or not is_up:
            found.must("up")
        fcntl.flock(users, fcntl.LOCK_SH)
        yield found
        if _alone(users) and ours.exists():
            found.must("down")
            ours.unlink()


def _alone(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@pytest.fixture(scope="session")
def make_testbed() -> Iterator[MakeTestbed]:
    """Start testbeds of a test's own, to break as it likes; they are removed at the end of the session."""
    require_slurm()
    made: list[Testbed] = []
    count = itertools.count()

    def make(*options: str) -> Testbed:
        # Names and addresses that neither another process nor the machine's network uses: RFC 2544 keeps
        # 198.18.0.0/15 for such purposes.
        number = os.getpid() * 3 + next(count)
        subnet = f"198.{18 + number // 256 % 2}.{number % 256}.0/24"
        new = Testbed(Path(tempfile.mkdtemp(prefix="testbed-")))
        made.append(new)
        new.must("up", "--bridge", f"t{number}", "--subnet", subnet, *options)
        return new

    yield make
    for testbed in made:
        with contextlib.suppress(subprocess.TimeoutExpired):
            testbed.verb("down", "--purge")
        shutil.rmtree(testbed.dir, ignore_errors=True)


@pytest.fixture(scope="session")
def quickstart_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The quickstart's policy, which all nodes see because it is in the user's cache."""
    with (Path(tempfile.gettempdir()) / "rollart-tests-model.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # made once, whichever process comes first
        command = [sys.executable, "-m", "hpc_rollart", "model", "build", "conf/quickstart.yaml"]
        built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    return built.stdout.strip()
