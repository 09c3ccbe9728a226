"""Scratch directories: private, gone at the end, and cleared by the next launcher if theirs was killed."""

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_rollart.errors import LaunchError
from hpc_rollart.launch import processes, scratch

HOLD = """
import sys, time
from pathlib import Path
from hpc_rollart.launch import scratch
with scratch.directory(Path(sys.argv[1]), sys.argv[2]) as path:
    (path / "segment").write_text("x")
    print(path, flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def launcher(base: Path) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
    """A process of another run that holds a scratch directory."""
    command = [sys.executable, "-c", HOLD, str(base), str(uuid.uuid4())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_the_directory_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with scratch.directory(tmp_path, "run") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not any(tmp_path.iterdir())


def test_a_killed_launchers_directory_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path) -> None:
    with launcher(tmp_path) as (_, kept), launcher(tmp_path) as (killed, left):
        killed.kill()
        killed.wait(10)
        assert (left / "segment").exists()
        with scratch.directory(tmp_path, "run") as mine:
            assert sorted(tmp_path.iterdir()) == sorted((kept, mine))
        assert (kept / "segment").exists()


def test_a_killed_launchers_directory_stays_while_ranks_of_its_run_are_alive(tmp_path: Path) -> None:
    with launcher(tmp_path) as (killed, left):
        killed.kill()
        killed.wait(10)
        environment = os.environ | {processes.MARKER: killed.args[-1]}  # type: ignore[index]
        with subprocess.Popen(["sleep", "60"], env=environment) as rank:
            try:
                with scratch.directory(tmp_path, "run"):
                    assert (left / "segment").exists()
            finally:
                rank.kill()
        with scratch.directory(tmp_path, "run"):
            assert not left.exists()


def test_a_directory_whose_launcher_died_before_it_had_the_lock_goes_too(tmp_path: Path) -> None:
    (tmp_path / "rollart-abcd_123").mkdir()
    with scratch.directory(tmp_path, "run") as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_what_others_keep_under_a_like_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rollart-results").mkdir()
    (tmp_path / "rollart-notes").write_text("mine")
    with scratch.directory(tmp_path, "run"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"rollart-results", "rollart-notes"}


def test_a_file_system_without_locks_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    message = r"cannot make a scratch directory under .*: Function not"
    with pytest.raises(LaunchError, match=message), scratch.directory(tmp_path, "run"):
        pass
    assert not any(tmp_path.iterdir())
