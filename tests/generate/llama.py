"""A random Llama small enough for a test, and helpers that drive an engine over it."""

from collections.abc import Callable, Iterable

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_rollart.generate.engine import Completion, Request, StepResult
from hpc_rollart.generate.transformers_engine import TransformersEngine
from hpc_rollart.messages import Sampling

VOCABULARY = 48
GREEDY = Sampling(temperature=0.0, max_tokens=12)


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Two layers, four query and two key heads; weights wide enough that its choices are not ties."""
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()


def engine_of(model: LlamaForCausalLM | None = None, **settings: object) -> TransformersEngine:
    """An engine over a model of its own (`tiny_llama(0)` if none is given), without an end token."""
    defaults: dict[str, object] = {"eos_ids": (), "max_context": 256}
    return TransformersEngine(model or tiny_llama(), **(defaults | settings))  # type: ignore[arg-type]


def prompt(length: int, seed: int = 0) -> np.ndarray:
    """Random token ids, int32, shape (length,)."""
    return np.random.default_rng([seed, length]).integers(1, VOCABULARY, length).astype(np.int32)


def request(
    trajectory: int, tokens: np.ndarray, sampling: Sampling = GREEDY, turn: int = 0, seed: int | None = None
) -> Request:
    """A request; the seed is the trajectory's number unless given."""
    return Request(trajectory, turn, tokens, sampling, trajectory if seed is None else seed)


def run(
    engine: TransformersEngine,
    requests: Iterable[Request] = (),
    until: Callable[[StepResult], bool] | None = None,
) -> dict[int, Completion]:
    """Add the requests and step until there is nothing to do (or `until`); completions by trajectory."""
    for one in requests:
        engine.add(one)
    done: dict[int, Completion] = {}
    for _ in range(2000):
        if not engine.has_work():
            return done
        result = engine.step()
        for completion in result.completions:
            assert completion.trajectory not in done
            done[completion.trajectory] = completion
        if until is not None and until(result):
            return done
    raise AssertionError(f"2000 steps were not enough: {engine.running} running, {engine.waiting} waiting")


@torch.no_grad()
def plain_logprobs(model: LlamaForCausalLM, context: np.ndarray, sampled: np.ndarray) -> np.ndarray:
    """Log-probs of `sampled` after `context`, from one plain forward of the model at temperature 1."""
    tokens = torch.from_numpy(np.concatenate([context, sampled]).astype(np.int64))
    logprobs = model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
    picked = logprobs[context.size - 1 : -1].gather(1, tokens[context.size :, None])
    return picked[:, 0].numpy()


@torch.no_grad()
def plain_greedy(model: LlamaForCausalLM, context: np.ndarray, count: int) -> np.ndarray:
    """The `count` tokens that the model's own `generate` appends."""
    ids = torch.from_numpy(context.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count
    )
    return out[0, context.size :].numpy().astype(np.int32)
