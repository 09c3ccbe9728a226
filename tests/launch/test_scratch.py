"""Scratch directories: private, gone at the end, and cleared by the next launcher if theirs was killed."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from hpc_rollart.launch import scratch

HOLD = """
import sys, time
from pathlib import Path
from hpc_rollart.launch import scratch
with scratch.directory(Path(sys.argv[1])) as path:
    (path / "segment").write_text("x")
    print(path, flush=True)
    time.sleep(60)
"""


def test_the_directory_is_private_and_gone_at_the_end(tmp_path: Path) -> None:
    with scratch.directory(tmp_path) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert not any(tmp_path.iterdir())


def test_a_killed_launchers_directory_goes_with_the_next_and_a_living_ones_stays(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed,
    ):
        try:
            assert living.stdout and killed.stdout
            kept, left = Path(living.stdout.readline().strip()), Path(killed.stdout.readline().strip())
            os.kill(killed.pid, signal.SIGKILL)
            killed.wait(10)
            assert (left / "segment").exists()
            with scratch.directory(tmp_path) as mine:
                assert sorted(tmp_path.iterdir()) == sorted((kept, mine))
            assert (kept / "segment").exists()
        finally:
            living.kill()
            killed.kill()


def test_what_others_keep_under_a_like_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "rollart-results").mkdir()
    (tmp_path / "rollart-notes").write_text("mine")
    with scratch.directory(tmp_path):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"rollart-results", "rollart-notes"}
