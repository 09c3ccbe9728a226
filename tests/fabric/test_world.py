"""The world says who is who, and refuses a world that is not the configured one."""

import json
from pathlib import Path

from tests.fabric.mpi_run import run_mpi

PROGRAM = Path(__file__).parent / "programs" / "roles.py"


def test_ranks_take_roles_in_component_order() -> None:
    lines = run_mpi(5, PROGRAM).stdout.splitlines()
    facts = sorted((json.loads(line) for line in lines), key=lambda fact: fact["rank"])
    assert [fact["component"] for fact in facts] == ["generate", "trainer", "generate-big", "env", "env"]
    assert [fact["role"] for fact in facts] == ["generator", "trainer", "generator", "env", "env"]
    assert [fact["is_coordinator"] for fact in facts] == [False, False, False, True, False]
    for fact in facts:
        assert fact["coordinator"] == 3
        assert fact["trainer"] == 1
        assert fact["generators"] == {"0": 3, "2": 5}
        assert fact["env"] == [4]
        assert fact["name"] == f"generate-big-2 on {fact['host']}"


def test_the_trainer_is_root_of_the_weights_communicator() -> None:
    lines = run_mpi(5, PROGRAM).stdout.splitlines()
    facts = sorted((json.loads(line) for line in lines), key=lambda fact: fact["rank"])
    assert [fact["weights_rank"] for fact in facts] == [1, 0, 2, None, None]
    assert facts[0]["weights_ranks"] == [1, 0, 2]


def test_a_world_of_the_wrong_size_is_refused_and_says_how_to_start_it() -> None:
    run = run_mpi(1, PROGRAM, check=False)
    assert "MPI world has 1 rank, the config asks for 5" in run.stdout
    assert "was it started with mpirun?" in run.stdout
    assert run.returncode == 3
    assert "MPI world has 2 ranks, the config asks for 5" in run_mpi(2, PROGRAM, check=False).stdout


def test_a_rank_started_for_another_component_is_refused_by_all() -> None:
    run = run_mpi(5, PROGRAM, check=False, env={"ROLLART_COMPONENT": "trainer"})
    assert run.stdout.count("ROLLART_COMPONENT=trainer") == 5
    assert "makes it one of generate" in run.stdout
