"""The training step on a very small policy."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_rollart.models.forward import parameter_groups
from hpc_rollart.train.batch import Sample
from hpc_rollart.train.learner import AlgorithmSettings, Learner, split_groups
from hpc_rollart.train.objective import token_logprobs

VOCABULARY = 24


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def policy(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Log-prob of every token but the first given those before it, straight from the model's logits."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = model(input_ids=ids[None]).logits[0, :-1]
    values, _ = token_logprobs(logits, ids[1:], torch.full((len(ids) - 1,), temperature))
    return np.concatenate([[np.nan], values.numpy()]).astype(np.float32)


def batch(model: LlamaForCausalLM, groups: int = 4, size: int = 4, temperature: float = 1.0) -> list[Sample]:
    """Random trajectories of two turns, with `model` itself as the behaviour policy."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(groups * size):
        tokens = rng.integers(0, VOCABULARY, int(rng.integers(6, 20))).astype(np.int32)
        sampled = np.zeros(len(tokens), np.uint8)
        sampled[2:4] = 1
        sampled[-1] = 1
        samples.append(
            Sample(
                trajectory=i,
                group=i // size,
                task=0,
                reward=float(rng.integers(0, 2)) if i % size else 0.5,
                tokens=tokens,
                logprobs=np.where(sampled == 1, logprobs_of(model, tokens, temperature), np.nan),
                versions=np.where(sampled == 1, 0, -1).astype(np.int32),
                sampled=sampled,
                temperature=temperature,
            )
        )
    return samples


def weights(learner: Learner) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def gradient(samples: list[Sample], settings: AlgorithmSettings) -> torch.Tensor:
    """What one step hands to the optimiser."""
    learner = Learner(policy(), replace(settings, max_grad_norm=1e9))
    seen: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        seen.append(torch.cat([g.flatten() for g in gradients if g is not None]))

    learner.optimizer.register_step_pre_hook(keep)
    learner.step(samples)
    (flat,) = seen
    return flat


def test_a_bandit_is_learnt() -> None:
    """One prompt, one sampled token; reward 1 for token 7. Its probability rises from 1/24 to near 1."""
    model = policy()
    learner = Learner(model, AlgorithmSettings(learning_rate=1e-2))
    rng = np.random.default_rng(0)
    prompt = np.array([1, 2, 3], np.int32)
    mean_rewards = []
    for _ in range(40):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1]
            logprobs = torch.log_softmax(logits, -1).numpy().astype(np.float64)
        p = np.exp(logprobs)
        drawn = rng.choice(VOCABULARY, size=64, p=p / p.sum())
        samples = [
            Sample(
                trajectory=i,
                group=i // 16,
                task=0,
                reward=float(token == 7),
                tokens=np.append(prompt, token).astype(np.int32),
                logprobs=np.array([np.nan] * 3 + [logprobs[token]], np.float32),
                versions=np.array([-1, -1, -1, 0], np.int32),
                sampled=np.array([0, 0, 0, 1], np.uint8),
            )
            for i, token in enumerate(drawn)
        ]
        result = learner.step(samples)
        mean_rewards.append(float(np.mean([s.reward for s in samples])))
        assert result.metrics["skipped_updates"] == 0
    assert mean_rewards[0] < 0.2
    assert np.mean(mean_rewards[-5:]) > 0.9


def test_gradient_does_not_depend_on_how_the_batch_is_cut() -> None:
    samples = batch(policy())
    whole = gradient(samples, AlgorithmSettings(micro_batch_tokens=10_000))
    for budget in (1, 40, 100):
        assert torch.allclose(
            gradient(samples, AlgorithmSettings(micro_batch_tokens=budget)), whole, atol=1e-5
        )
    assert whole.abs().max() > 1e-3


def test_gradient_equals_autograd_through_the_whole_padded_model() -> None:
    """The reference computes every logit of one trajectory at a time and masks, as a textbook would."""
    model = policy()
    samples = batch(model, groups=2)
    advantages = Learner(policy(), AlgorithmSettings()).step(samples).advantages
    total = sum(s.sampled_count for s in samples)
    loss = torch.zeros(())
    for s, advantage in zip(samples, advantages, strict=True):
        ids = torch.from_numpy(s.tokens.astype(np.int64))
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1)
        values = logprobs.gather(1, ids[1:, None])[:, 0]
        mask = torch.from_numpy(s.sampled[1:].astype(np.float32))
        # At rho = 1 and w = 1 the surrogate's gradient is A times that of the log-prob.
        loss = loss - (values * mask).sum() * float(advantage) / total
    loss.backward()
    expected = {id(p): p.grad for p in model.parameters()}
    order = [p for group in parameter_groups(model, 0.0) for p in group["params"]]  # type: ignore[attr-defined]
    flat = torch.cat([expected[id(p)].flatten() for p in order])  # type: ignore[union-attr]
    assert torch.allclose(gradient(samples, AlgorithmSettings()), flat, atol=1e-5)


def test_only_sampled_tokens_contribute() -> None:
    """Log-probs at context positions, and tokens after the last sampled one, change nothing."""
    samples = batch(policy())
    altered = [
        replace(
            s,
            tokens=np.append(s.tokens, [3, 4]).astype(np.int32),
            logprobs=np.append(np.where(s.sampled == 1, s.logprobs, 123.0), [5.0, 6.0]).astype(np.float32),
            versions=np.append(s.versions, [8, 8]).astype(np.int32),
            sampled=np.append(s.sampled, [0, 0]).astype(np.uint8),
        )
        for s in samples
    ]
    settings = AlgorithmSettings()
    assert torch.equal(gradient(samples, settings), gradient(altered, settings))


def test_trainer_and_engine_agree_at_the_task_temperature() -> None:
    samples = batch(policy(), temperature=0.6)
    metrics = Learner(policy(), AlgorithmSettings()).step(samples).metrics
    assert metrics["kl_behaviour"] == pytest.approx(0, abs=1e-5)
    assert metrics["correction_mean"] == pytest.approx(1, abs=1e-4)
    wrong = [replace(s, temperature=1.0) for s in samples]
    assert Learner(policy(), AlgorithmSettings()).step(wrong).metrics["kl_behaviour"] > 1e-4


def test_one_thread_is_bit_identical() -> None:
    results = []
    for _ in range(2):
        learner = Learner(policy(), AlgorithmSettings(learning_rate=1e-3, minibatches=2))
        for _ in range(3):
            learner.step(batch(policy()))
        results.append(weights(learner))
    assert torch.equal(*results)


def test_later_minibatches_are_clipped_against_the_policy_at_the_start_of_the_batch() -> None:
    samples = batch(policy())
    once = Learner(policy(), AlgorithmSettings(learning_rate=0.05)).step(samples).metrics
    often = Learner(policy(), AlgorithmSettings(learning_rate=0.05, minibatches=4)).step(samples).metrics
    assert once["clip_fraction"] == 0
    assert often["clip_fraction"] > 0
    assert often["updates"] == 4


def test_minibatches_are_whole_groups() -> None:
    parts = split_groups(np.array([7, 7, 3, 3, 5, 5]), 2)
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3], [4, 5]]
    assert len(split_groups(np.array([1, 1, 2]), 5)) == 2


def test_weights_are_untouched_when_nothing_can_be_learnt() -> None:
    learner = Learner(policy(), AlgorithmSettings(learning_rate=0.1, weight_decay=0.1))
    learner.step(batch(policy()))  # gives AdamW a momentum that would move the weights by itself
    before = weights(learner)
    metrics = learner.step([replace(s, reward=1.0) for s in batch(policy())]).metrics
    assert torch.equal(weights(learner), before)
    assert metrics["all_advantages_zero"] == 1
    assert metrics["zero_advantage_groups"] == 4
    assert metrics["updates"] == metrics["skipped_updates"] == 0
    assert metrics["entropy"] > 0


def test_a_non_finite_gradient_skips_the_update_and_is_counted() -> None:
    learner = Learner(policy(), AlgorithmSettings(learning_rate=0.1))
    broken = learner.model.get_parameter("model.layers.0.mlp.up_proj.weight")
    with torch.no_grad():
        kept = broken[0, 0].clone()
        broken[0, 0] = float("inf")
    before = weights(learner)
    metrics = learner.step(batch(policy())).metrics
    assert metrics["skipped_updates"] == 1
    assert torch.equal(weights(learner), before)
    with torch.no_grad():
        broken[0, 0] = kept
    assert learner.step(batch(policy())).metrics["updates"] == 1


def test_advantages_come_back_in_the_order_of_the_samples() -> None:
    samples = batch(policy(), groups=1, size=3)
    samples = [replace(s, reward=r) for s, r in zip(samples, (0.0, 3.0, 0.0), strict=True)]
    result = Learner(policy(), AlgorithmSettings(normalise_std=False)).step(samples)
    assert result.advantages.tolist() == [-1.0, 2.0, -1.0]


def test_learning_rate_rises_linearly_during_warm_up() -> None:
    learner = Learner(policy(), AlgorithmSettings(learning_rate=4e-3, warmup_steps=4))
    rates = [learner.step(batch(policy())).metrics["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3])


def test_embeddings_and_norms_are_not_decayed() -> None:
    model = policy()
    decayed, kept = parameter_groups(model, 0.1)
    names = {id(p): n for n, p in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in kept["params"]} == {  # type: ignore[attr-defined]
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0.0


def test_published_tensors_are_complete_untied_and_in_the_published_type() -> None:
    learner = Learner(policy(), AlgorithmSettings(), publish_dtype=torch.bfloat16)
    state = learner.state_for_publish()
    assert "model.embed_tokens.weight" in state
    assert "lm_head.weight" not in state
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    other = policy(seed=1)
    result = other.load_state_dict(state, strict=False)
    assert result.missing_keys == ["lm_head.weight"]
    assert not result.unexpected_keys
    ids = torch.arange(8)[None]
    assert torch.allclose(other(input_ids=ids).logits, learner.model(input_ids=ids).logits, atol=0.05)


def test_half_precision_master_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 master weights"):
        Learner(policy().to(torch.bfloat16), AlgorithmSettings())
