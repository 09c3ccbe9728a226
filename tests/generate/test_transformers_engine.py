"""The engine samples what the plain model would, whatever else happens beside a request."""

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from hpc_rollart.generate.engine import Request
from hpc_rollart.messages import Sampling
from tests.generate.llama import (
    GREEDY,
    VOCABULARY,
    engine_of,
    plain_greedy,
    plain_logprobs,
    prompt,
    request,
    run,
    tiny_llama,
)

RAGGED = [prompt(n, seed=n) for n in (1, 2, 3, 17, 30, 31, 64, 90)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """For the expected values; engines get models of their own."""
    return tiny_llama()


# --- parity with the plain model ---------------------------------------------------------------------


@pytest.mark.parametrize("prefill_tokens", [7, 2048])
@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_equals_generate_for_ragged_requests(
    model: LlamaForCausalLM, deterministic: bool, prefill_tokens: int
) -> None:
    engine = engine_of(deterministic=deterministic, prefill_tokens=prefill_tokens, max_requests=5)
    done = run(engine, [request(i, tokens) for i, tokens in enumerate(RAGGED)])
    for i, tokens in enumerate(RAGGED):
        np.testing.assert_array_equal(done[i].tokens, plain_greedy(model, tokens, 12))
        assert done[i].stop == "max_tokens"
        assert done[i].seconds >= 0


@pytest.mark.parametrize("prefill_tokens", [7, 2048])
def test_log_probs_equal_those_of_a_plain_forward(model: LlamaForCausalLM, prefill_tokens: int) -> None:
    engine = engine_of(prefill_tokens=prefill_tokens, max_requests=5)
    engine.install(tiny_llama().state_dict(), version=7)
    done = run(engine, [request(i, t, Sampling(max_tokens=5 + i)) for i, t in enumerate(RAGGED)])
    for i, tokens in enumerate(RAGGED):
        one = done[i]
        assert one.tokens.dtype == one.versions.dtype == np.int32 and one.logprobs.dtype == np.float32
        assert one.tokens.shape == one.logprobs.shape == one.versions.shape == (5 + i,)
        assert set(one.versions.tolist()) == {7}
        np.testing.assert_allclose(one.logprobs, plain_logprobs(model, tokens, one.tokens), atol=1e-4)


def test_a_long_context_beside_many_short_ones_is_attended_exactly(model: LlamaForCausalLM) -> None:
    lengths = [200, *[3] * 11]
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    done = run(engine_of(), [request(i, tokens) for i, tokens in enumerate(prompts)])
    for i, tokens in enumerate(prompts):
        np.testing.assert_array_equal(done[i].tokens, plain_greedy(model, tokens, 12))


def test_bfloat16_log_probs_are_near_those_of_a_plain_forward() -> None:
    plain = tiny_llama().bfloat16()
    done = run(engine_of(tiny_llama().bfloat16()), [request(0, RAGGED[4], Sampling(max_tokens=20))])
    expected = plain_logprobs(plain, RAGGED[4], done[0].tokens)
    np.testing.assert_allclose(done[0].logprobs, expected, atol=0.2)


# --- sampling settings and seeds ----------------------------------------------------------------------


def test_every_request_has_its_own_settings(model: LlamaForCausalLM) -> None:
    tokens = RAGGED[3]
    settings = [
        Sampling(temperature=0.0, max_tokens=9),
        Sampling(temperature=1.0, top_k=1, max_tokens=9),
        Sampling(temperature=1.0, top_p=1e-6, max_tokens=3),
        Sampling(temperature=5.0, max_tokens=9),
    ]
    done = run(engine_of(), [request(i, tokens, one) for i, one in enumerate(settings)])
    greedy = plain_greedy(model, tokens, 9)
    for i in (0, 1):
        np.testing.assert_array_equal(done[i].tokens, greedy)
        np.testing.assert_allclose(done[i].logprobs, 0, atol=1e-6)
    np.testing.assert_array_equal(done[2].tokens, greedy[:3])
    assert (done[3].tokens != greedy).any()


def test_the_seed_decides_the_sample() -> None:
    sampling = Sampling(max_tokens=20)
    seeds = [5, 5, 6, -1, (1 << 64) - 1]
    done = run(engine_of(), [request(i, RAGGED[2], sampling, seed=seed) for i, seed in enumerate(seeds)])
    again = run(engine_of(max_requests=1), [request(0, RAGGED[2], sampling, seed=5)])
    np.testing.assert_array_equal(done[0].tokens, done[1].tokens)
    np.testing.assert_array_equal(done[0].tokens, again[0].tokens)
    assert (done[0].tokens != done[2].tokens).any()
    np.testing.assert_array_equal(done[3].tokens, done[4].tokens)


def test_a_request_restarted_after_some_tokens_draws_the_same_rest() -> None:
    sampling = Sampling(max_tokens=20)
    whole = run(engine_of(), [request(0, RAGGED[2], sampling, seed=9)])[0].tokens
    context = np.concatenate([RAGGED[2], whole[:8]])
    rest = run(engine_of(), [request(1, context, Sampling(max_tokens=12), seed=9)])[1].tokens
    np.testing.assert_array_equal(rest, whole[8:])


# --- how a turn ends -----------------------------------------------------------------------------------


def test_the_end_token_ends_a_turn_and_is_part_of_it(model: LlamaForCausalLM) -> None:
    expected = plain_greedy(model, RAGGED[3], 12)
    eos = int(expected[5])
    first = int(np.flatnonzero(expected == eos)[0])
    done = run(engine_of(eos_ids=(eos,)), [request(0, RAGGED[3])])
    assert done[0].stop == "eos"
    np.testing.assert_array_equal(done[0].tokens, expected[: first + 1])


def test_a_full_context_ends_a_turn() -> None:
    engine = engine_of(max_context=36)
    done = run(engine, [request(0, RAGGED[4]), request(1, RAGGED[3])])
    assert (done[0].stop, done[0].tokens.size) == ("max_context", 6)
    assert (done[1].stop, done[1].tokens.size) == ("max_tokens", 12)
    assert engine.idle == 1  # nothing is kept of the one that cannot go on


@pytest.mark.parametrize("length", [36, 64])
def test_a_context_without_room_ends_at_once_without_tokens(length: int) -> None:
    engine = engine_of(max_context=36)
    engine.add(request(3, prompt(length)))
    assert engine.has_work()
    result = engine.step()
    (done,) = result.completions
    assert (done.trajectory, done.stop, done.tokens.size, done.logprobs.size) == (3, "max_context", 0, 0)
    assert not result.first_tokens and not engine.has_work()


def test_the_first_token_is_announced_once_and_only_in_turn_0() -> None:
    engine = engine_of(prefill_tokens=16)
    engine.version = 4
    for one in (request(0, RAGGED[1]), request(1, RAGGED[7]), request(2, RAGGED[2], turn=1)):
        engine.add(one)
    seen = []
    while engine.has_work():
        seen += engine.step().first_tokens
    assert seen == [(0, 4), (1, 4)]


@pytest.mark.parametrize(
    ("tokens", "sampling", "message"),
    [
        ([1, VOCABULARY], GREEDY, f"token id {VOCABULARY} is outside the vocabulary of {VOCABULARY}"),
        ([-1], GREEDY, "token id -1 is outside"),
        ([], GREEDY, "non-empty"),
        ([[1]], GREEDY, "non-empty vector"),
        ([1], Sampling(max_tokens=0), "max_tokens"),
        ([1], Sampling(temperature=-0.1), "temperature"),
        ([1], Sampling(temperature=float("nan")), "temperature"),
        ([1], Sampling(top_p=0.0), "top_p"),
        ([1], Sampling(top_k=-1), "top_k"),
    ],
)
def test_an_impossible_request_is_refused_by_name(
    tokens: list[int], sampling: Sampling, message: str
) -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match=f"trajectory 8, turn 2.*{message}"):
        engine.add(Request(8, 2, np.array(tokens, np.int32), sampling, 0))
    assert not engine.has_work()


def test_a_second_request_of_a_trajectory_is_refused() -> None:
    engine = engine_of(max_requests=1)
    engine.add(request(0, RAGGED[0]))
    engine.add(request(1, RAGGED[0]))
    engine.step()
    for trajectory in (0, 1):
        with pytest.raises(ValueError, match=f"trajectory {trajectory}.*already"):
            engine.add(request(trajectory, RAGGED[0]))


def test_weights_that_give_nan_are_an_error_that_names_their_version() -> None:
    engine = engine_of()
    broken = {name: torch.full_like(tensor, torch.nan) for name, tensor in tiny_llama().state_dict().items()}
    engine.install(broken, version=3)
    engine.add(request(0, RAGGED[0], Sampling(max_tokens=3)))
    with pytest.raises(FloatingPointError, match=r"version 3 .*trajectory 0"):
        engine.step()


# --- scheduling ----------------------------------------------------------------------------------------


def test_a_long_context_leaves_decoding_requests_their_token_every_step() -> None:
    engine = engine_of(prefill_tokens=16)
    engine.add(request(0, RAGGED[1], Sampling(max_tokens=30)))
    engine.step()
    engine.add(request(1, RAGGED[7]))
    steps = [engine.step() for _ in range(5)]
    assert [result.processed for result in steps] == [17] * 5
    assert [result.sampled for result in steps] == [1] * 5


def test_requests_wait_for_a_place_first_come_first_served() -> None:
    engine = engine_of(max_requests=2)
    order = []
    for i in range(6):
        engine.add(request(i, RAGGED[2], Sampling(max_tokens=4)))
    engine.step()
    assert (engine.running, engine.waiting) == (2, 4)
    while engine.has_work():
        order += [completion.trajectory for completion in engine.step().completions]
        assert engine.running <= 2
    assert order == list(range(6))


def test_an_aborted_request_frees_its_place_at_once_and_disturbs_nobody(model: LlamaForCausalLM) -> None:
    engine = engine_of(max_requests=3)
    for i in range(5):
        engine.add(request(i, RAGGED[i + 3]))
    for _ in range(4):
        engine.step()
    engine.abort(0)
    engine.abort(4)
    engine.abort(99)
    assert (engine.running, engine.waiting) == (2, 1)
    engine.step()
    assert (engine.running, engine.waiting) == (3, 0)
    done = run(engine)
    assert sorted(done) == [1, 2, 3]
    for i in done:
        np.testing.assert_array_equal(done[i].tokens, plain_greedy(model, RAGGED[i + 3], 12))


def test_a_request_may_end_before_a_later_one_was_ever_processed(model: LlamaForCausalLM) -> None:
    engine = engine_of(prefill_tokens=1)
    requests = [request(0, RAGGED[0], Sampling(temperature=0.0, max_tokens=2))]
    requests += [request(i, RAGGED[3]) for i in (1, 2, 3)]
    done = run(engine, requests)
    for i in (1, 2, 3):
        np.testing.assert_array_equal(done[i].tokens, plain_greedy(model, RAGGED[3], 12))


def test_an_aborted_trajectory_may_start_again() -> None:
    engine = engine_of()
    engine.add(request(0, RAGGED[3]))
    engine.step()
    engine.abort(0)
    assert not engine.has_work()
    assert run(engine, [request(0, RAGGED[3])])[0].tokens.size == 12
    engine.abort(0)
    assert engine.idle == 0


# --- KV between turns ------------------------------------------------------------------------------------


def next_turn(context: np.ndarray, sampled: np.ndarray, seen: int = 5) -> np.ndarray:
    """Context of the next turn: what was said, and `seen` tokens from the environment."""
    return np.concatenate([context, sampled, prompt(seen, seed=seen)])


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_later_turn_equals_a_fresh_request(model: LlamaForCausalLM, deterministic: bool) -> None:
    engine = engine_of(deterministic=deterministic)
    contexts = dict(enumerate(RAGGED[3:7]))
    for turn in range(3):
        done = run(engine, [request(i, tokens, turn=turn) for i, tokens in contexts.items()])
        for i, tokens in contexts.items():
            np.testing.assert_array_equal(done[i].tokens, plain_greedy(model, tokens, 12))
        contexts = {i: next_turn(tokens, done[i].tokens) for i, tokens in contexts.items()}


def test_only_what_is_new_in_a_turn_goes_through_the_model() -> None:
    engine = engine_of()
    done = run(engine, [request(0, RAGGED[5])])
    engine.add(request(0, next_turn(RAGGED[5], done[0].tokens), turn=1))
    assert engine.step().processed == 1 + 5  # the last sample never had gone through


def test_a_turn_that_rewrites_its_context_reuses_the_common_prefix(model: LlamaForCausalLM) -> None:
    engine = engine_of()
    run(engine, [request(0, RAGGED[5])])
    rewritten = RAGGED[5].copy()
    rewritten[20] = rewritten[20] % (VOCABULARY - 1) + 1
    engine.add(request(0, rewritten, turn=1))
    first = engine.step()
    assert first.processed == rewritten.size - 20
    np.testing.assert_array_equal(run(engine)[0].tokens, plain_greedy(model, rewritten, 12))
    # The very same context again: one token must go through the model for its logits.
    engine.add(request(0, rewritten, turn=2))
    assert engine.step().processed == 1


def test_the_least_recently_used_idle_trajectory_loses_its_kv_when_places_are_short() -> None:
    engine = engine_of(max_requests=3)
    run(engine, [request(0, RAGGED[5])])
    run(engine, [request(1, RAGGED[5])])
    run(engine, [request(2, RAGGED[5])])
    assert engine.idle == 3
    engine.add(request(0, RAGGED[5], turn=1))  # now 1 is the oldest
    engine.add(request(3, RAGGED[5]))
    engine.step()
    assert (engine.running, engine.idle) == (2, 1)
    run(engine)
    engine.add(request(2, RAGGED[5], turn=1))
    assert engine.step().processed == 1
    run(engine)
    engine.add(request(1, RAGGED[5], turn=1))
    assert engine.step().processed == RAGGED[5].size


def test_the_end_of_a_trajectory_drops_its_kv() -> None:
    engine = engine_of()
    run(engine, [request(0, RAGGED[5])])
    engine.end(0)
    engine.end(0)
    assert engine.idle == 0


# --- new weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("steps_before", [1, 6])
def test_after_install_and_recompute_the_rest_is_what_the_new_model_generates(
    steps_before: int, deterministic: bool
) -> None:
    new = tiny_llama(seed=1)
    engine = engine_of(prefill_tokens=40, deterministic=deterministic)
    for i, tokens in enumerate(RAGGED):
        engine.add(request(i, tokens))
    done = {}
    for _ in range(steps_before):
        engine.step()
    engine.install(new.state_dict(), version=1)
    assert engine.recompute() > 0
    done = run(engine)
    for i, tokens in enumerate(RAGGED):
        before = int((done[i].versions == 0).sum())
        assert before <= steps_before and done[i].versions.tolist() == [0] * before + [1] * (12 - before)
        context = np.concatenate([tokens, done[i].tokens[:before]])
        np.testing.assert_array_equal(done[i].tokens[before:], plain_greedy(new, context, 12 - before))


def test_log_probs_after_recompute_are_those_of_the_new_model_on_the_whole_prefix() -> None:
    new = tiny_llama(seed=1)
    engine = engine_of()
    engine.add(request(0, RAGGED[4], Sampling(max_tokens=20)))
    for _ in range(8):
        engine.step()
    engine.install(new.state_dict(), version=1)
    engine.recompute()
    one = run(engine)[0]
    np.testing.assert_allclose(one.logprobs[8:], plain_logprobs(new, RAGGED[4], one.tokens)[8:], atol=1e-4)
    np.testing.assert_allclose(
        one.logprobs[:8], plain_logprobs(tiny_llama(), RAGGED[4], one.tokens)[:8], atol=1e-4
    )


def test_the_number_recomputed_is_what_the_steps_then_report() -> None:
    engine = engine_of(prefill_tokens=32)
    for i in (3, 4, 5):
        engine.add(request(i, RAGGED[i]))
    for _ in range(4):
        engine.step()
    promised = engine.recompute()
    done = 0
    while engine.has_work():
        done += engine.step().recomputed
    assert done == promised > 0


def test_recompute_forgets_idle_trajectories_and_keep_does_not() -> None:
    for recompute, processed in ((True, RAGGED[5].size), (False, 1)):
        engine = engine_of()
        run(engine, [request(0, RAGGED[5])])
        engine.install(tiny_llama(seed=1).state_dict(), version=1)
        if recompute:
            assert engine.recompute() == 0
        engine.add(request(0, RAGGED[5], turn=1))
        assert engine.step().processed == processed


def test_without_recompute_the_next_token_still_comes_from_the_new_weights() -> None:
    engine = engine_of()
    engine.add(request(0, RAGGED[4]))
    engine.step()
    engine.install(tiny_llama(seed=1).state_dict(), version=5)
    one = run(engine)[0]
    assert one.versions.tolist() == [0] + [5] * 11


def test_install_copies() -> None:
    engine = engine_of()
    tensors = {name: tensor.clone() for name, tensor in tiny_llama(seed=1).state_dict().items()}
    engine.install(tensors, version=1)
    for tensor in tensors.values():
        tensor.zero_()
    done = run(engine, [request(0, RAGGED[3])])
    np.testing.assert_array_equal(done[0].tokens, plain_greedy(tiny_llama(seed=1), RAGGED[3], 12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor was given for model.norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "the model has no tensor extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight has shape \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(change, message: str) -> None:  # type: ignore[no-untyped-def]
    engine = engine_of()
    tensors = dict(tiny_llama(seed=1).state_dict())
    change(tensors)
    with pytest.raises(ValueError, match=f"version 1: .*{message}"):
        engine.install(tensors, version=1)
    assert engine.version == 0
    done = run(engine, [request(0, RAGGED[3])])
    np.testing.assert_array_equal(done[0].tokens, plain_greedy(tiny_llama(), RAGGED[3], 12))


def test_one_name_of_tied_weights_is_enough_and_two_must_agree() -> None:
    new = tiny_llama(seed=1, tie_word_embeddings=True)
    engine = engine_of(tiny_llama(tie_word_embeddings=True))
    both = dict(new.state_dict())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= both.keys()
    engine.install(both, version=1)
    engine.install(dict(new.named_parameters()), version=2)
    done = run(engine, [request(0, RAGGED[3])])
    np.testing.assert_array_equal(done[0].tokens, plain_greedy(new, RAGGED[3], 12))
    with pytest.raises(ValueError, match="tied but differ"):
        engine.install(both | {"lm_head.weight": both["lm_head.weight"] + 1}, version=3)
    del both["lm_head.weight"], both["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match="no tensor was given"):
        engine.install(both, version=3)
    assert engine.version == 2


# --- deterministic ------------------------------------------------------------------------------------------


def test_deterministic_requests_are_bit_identical_alone_and_in_company_and_after_evictions() -> None:
    sampling = Sampling(max_tokens=10, temperature=0.9, top_p=0.95)

    def second_turn(company: int, places: int) -> list[np.ndarray]:
        engine = engine_of(deterministic=True, prefill_tokens=24, max_requests=places)
        others = [request(100 + i, prompt(5 + 9 * i, seed=i), sampling) for i in range(company)]
        for one in others[: company // 2]:
            engine.add(one)
        for _ in range(min(3, company)):
            engine.step()
        first = run(engine, [request(7, RAGGED[6], sampling), *others[company // 2 :]])[7]
        # Others come and go between the turns, so that kept KV would be evicted.
        run(engine, [request(200 + i, prompt(40, seed=i), sampling) for i in range(company)])
        context = next_turn(RAGGED[6], first.tokens)
        again = [request(300 + i, prompt(100, seed=i), sampling) for i in range(company)]
        second = run(engine, [*again, request(7, context, sampling, turn=1)])[7]
        return [first.tokens, first.logprobs, second.tokens, second.logprobs]

    alone = second_turn(company=0, places=1)
    for company, places in ((15, 16), (15, 4)):
        for expected, got in zip(alone, second_turn(company, places), strict=True):
            np.testing.assert_array_equal(expected, got)


# --- closing --------------------------------------------------------------------------------------


def test_closing_gives_the_model_its_own_attention_back(model: LlamaForCausalLM) -> None:
    own = tiny_llama()
    engine = engine_of(own)
    run(engine, [request(0, RAGGED[3])])
    engine.close()
    assert not engine.has_work()
    np.testing.assert_array_equal(plain_greedy(own, RAGGED[3], 12), plain_greedy(model, RAGGED[3], 12))
