"""Whatever the order of events, every request ends exactly once, as it should, and no place is lost."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_rollart.generate.engine import Completion, StepResult
from hpc_rollart.messages import Sampling
from tests.generate.llama import engine_of, plain_logprobs, prompt, request, tiny_llama

MAX_CONTEXT = 40
WEIGHTS = [tiny_llama(seed=seed, num_hidden_layers=1, hidden_size=32) for seed in range(2)]

lengths = st.sampled_from([1, 1, 2, 6, 20, MAX_CONTEXT - 1, MAX_CONTEXT, MAX_CONTEXT + 1])
add = st.tuples(st.just("add"), st.integers(0, 7), lengths, st.integers(1, 9))
drop = st.tuples(st.sampled_from(["abort", "end"]), st.integers(0, 7))
install = st.tuples(st.just("install"), st.booleans())
step = st.just(("step",))
events = st.lists(st.one_of(add, add, drop, install, step, step), min_size=8, max_size=40)


@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=events,
    max_requests=st.integers(1, 4),
    prefill_tokens=st.sampled_from([1, 5, 64]),
    deterministic=st.booleans(),
)
def test_each_added_request_ends_once_or_was_aborted_and_no_place_leaks(
    events: list[tuple[Any, ...]], max_requests: int, prefill_tokens: int, deterministic: bool
) -> None:
    engine = engine_of(
        tiny_llama(seed=0, num_hidden_layers=1, hidden_size=32),
        max_context=MAX_CONTEXT,
        max_requests=max_requests,
        prefill_tokens=prefill_tokens,
        deterministic=deterministic,
        eos_ids=(3,),
    )
    # Contexts grow as in an episode: what was said, then something from the environment.
    contexts: dict[int, np.ndarray] = {}
    turns: dict[int, int] = {}
    live: dict[int, tuple[np.ndarray, Sampling, int]] = {}
    announced: list[tuple[int, int]] = []
    # With stale KV a log-prob belongs to no single model: only then is the value not checked.
    exact = True

    def finish(done: Completion) -> None:
        tokens, sampling, turn = live.pop(done.trajectory)
        assert done.turn == turn
        size = done.tokens.size
        assert size == done.logprobs.size == done.versions.size <= sampling.max_tokens
        assert (np.diff(done.versions) >= 0).all()
        assert (3 not in done.tokens[:-1].tolist()) and tokens.size + size <= max(MAX_CONTEXT, tokens.size)
        if done.stop == "eos":
            assert done.tokens[-1] == 3
        elif done.stop == "max_tokens":
            assert size == sampling.max_tokens
        else:
            assert tokens.size + size == max(MAX_CONTEXT, tokens.size)
        if exact and size:
            for version in set(done.versions.tolist()):
                expected = plain_logprobs(WEIGHTS[version % 2], tokens, done.tokens)
                of_version = done.versions == version
                np.testing.assert_allclose(done.logprobs[of_version], expected[of_version], atol=1e-4)
        contexts[done.trajectory] = np.concatenate([tokens, done.tokens])

    def take_step() -> None:
        result: StepResult = engine.step()
        announced.extend(result.first_tokens)
        for done in result.completions:
            finish(done)
        assert engine.running <= max_requests
        assert engine.running + engine.idle <= max_requests
        assert engine.running + engine.waiting == len(live)

    for event in events:
        match event:
            case ("add", trajectory, length, max_tokens) if trajectory not in live:
                old = contexts.get(trajectory, np.empty(0, np.int32))
                tokens = np.concatenate([old, prompt(length, seed=trajectory)])[: MAX_CONTEXT + 1]
                turn = turns.get(trajectory, 0)
                turns[trajectory] = turn + 1
                live[trajectory] = (tokens, Sampling(max_tokens=max_tokens), turn)
                engine.add(request(trajectory, tokens, live[trajectory][1], turn=turn))
            case ("abort", trajectory):
                engine.abort(trajectory)
                live.pop(trajectory, None)
            case ("end", trajectory) if trajectory not in live:
                engine.end(trajectory)
            case ("install", recompute):
                engine.install(WEIGHTS[(engine.version + 1) % 2].state_dict(), engine.version + 1)
                if recompute:
                    engine.recompute()
                else:
                    exact = False
            case ("step",):
                take_step()
    for _ in range(3000):
        if not engine.has_work():
            break
        take_step()
    assert not live and not engine.running and not engine.waiting
    trajectories = [trajectory for trajectory, _ in announced]
    assert len(trajectories) == len(set(trajectories))
    for trajectory in range(8):
        engine.end(trajectory)
    assert engine.idle == 0
