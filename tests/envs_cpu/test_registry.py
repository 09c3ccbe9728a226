"""Names and arguments of environments are checked before anything runs, with messages that mend."""

import doctest
import random
import subprocess
import sys
from typing import Any

import pytest

import envs_cpu.api
from envs_cpu import EnvConfigError, TextEnv, check_env, make


class Echo:
    """An environment of one's own, addressed by its entry path."""

    def __init__(self, shout: bool = False) -> None:
        self.shout = shout

    def reset(self, seed: int) -> str:
        return f"seed {seed}"

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return (text.upper() if self.shout else text), 0.0, False, False, {}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("frozenlake", {}, r"'frozenlake': no such environment; did you mean 'frozen-lake'"),
        ("tetris", {}, r"valid are: frozen-lake, reasoning-gym"),
        ("frozen-lake", {"sise": 4}, r"args\.sise: unknown key; did you mean 'size'"),
        ("frozen-lake", {"size": 1}, r"args\.size: .*greater than or equal to 2 \(got 1\)"),
        ("frozen-lake", {"size": 1, "sise": 4}, r"args\.size.*; args\.sise"),
        ("reasoning-gym", {}, r"args\.task: missing"),
        ("reasoning-gym", {"task": "chainsum"}, r"unknown task 'chainsum'; did you mean 'chain_sum'"),
        (
            "reasoning-gym",
            {"task": "chain_sum", "config": {"max_term": 3}},
            r"config\.max_term: .*'max_terms'",
        ),
        (
            "reasoning-gym",
            {"task": "chain_sum", "config": {"max_terms": 1}},
            r"max_terms must be >= min_terms",
        ),
        ("reasoning-gym", {"task": "chain_sum", "config": {"seed": 1}}, r"config\.seed: set by the run"),
        (
            "no_such_module:Env",
            {},
            r"No module named 'no_such_module'; install it, or put its folder on PYTHONPATH",
        ),
        ("tests.envs_cpu.test_registry:Ecko", {}, r"has no 'Ecko'; did you mean 'Echo'"),
        (
            "tests.envs_cpu.test_registry:Echo",
            {"loud": True},
            r"unexpected keyword argument 'loud'; it takes shout",
        ),
        ("random:Random", {}, r"Random has no reset, step, close"),
    ],
)
def test_a_wrong_name_or_argument_is_named_with_its_mend(
    name: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvConfigError, match=message):
        check_env(name, args)
    with pytest.raises(EnvConfigError, match=message):
        make(name, **args)


def test_an_environment_of_ones_own_is_made_by_its_entry_path() -> None:
    env = make("tests.envs_cpu.test_registry:Echo", shout=True)
    assert isinstance(env, TextEnv)
    assert env.reset(3) == "seed 3"
    assert env.step("hello")[0] == "HELLO"


def test_the_documented_example_is_a_working_environment() -> None:
    namespace: dict[str, Any] = {}
    example = doctest.DocTestParser().get_examples(envs_cpu.api.__doc__ or "")
    for part in example:
        exec(part.source, namespace)
    env = namespace["GuessNumber"](highest=3)
    assert isinstance(env, TextEnv)
    env.reset(seed=1)
    assert any(env.step(str(guess))[2] for guess in range(4))


def test_importing_and_checking_frozen_lake_imports_no_suite_and_no_torch() -> None:
    code = (
        "import sys; from envs_cpu import check_env; check_env('frozen-lake', {'size': 5}); "
        "assert not {'torch', 'mpi4py', 'gymnasium', 'reasoning_gym', 'hpc_rollart'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["frozen-lake", "reasoning-gym"])
def test_built_in_environments_demonstrate(name: str) -> None:
    env = make(name, **({"task": "chain_sum"} if name == "reasoning-gym" else {}))
    assert isinstance(env, envs_cpu.api.Demonstrator)
    env.reset(0)
    assert isinstance(env.demonstrate(random.Random(0), 0.5), str)
