"""Families of models: those the engine serves exactly, and those it must refuse rather than serve wrongly."""

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hpc_rollart.generate.transformers_engine import TransformersEngine
from hpc_rollart.messages import Sampling
from tests.generate.llama import VOCABULARY, plain_logprobs, prompt, request, run

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny(family: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SHAPE | changes))).eval()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("mistral", {"sliding_window": None}),
        ("smollm3", {}),
        ("granite", {"logits_scaling": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}),
        ("olmo2", {}),
        ("phi3", {"resid_pdrop": 0.3}),
        ("gpt_neox", {"num_key_value_heads": 6}),
        ("gpt2", {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 128}),
    ],
)
def test_log_probs_equal_those_of_a_plain_forward(family: str, changes: dict[str, object]) -> None:
    plain = tiny(family, **changes)
    engine = TransformersEngine(tiny(family, **changes), (), max_context=128, prefill_tokens=20)
    contexts = [prompt(n, seed=n) for n in (2, 33, 15)]
    done = run(engine, [request(i, c, Sampling(max_tokens=8)) for i, c in enumerate(contexts)])
    for i, context in enumerate(contexts):
        expected = plain_logprobs(plain, context, done[i].tokens)  # type: ignore[arg-type]
        np.testing.assert_allclose(done[i].logprobs, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 16}, "sliding_window=16 below max_context=128"),
        ("gemma2", {"sliding_window": 512}, "softcap"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ("bloom", {"n_head": 6, "n_layer": 2}, "attention is not the ordinary one"),
        ("mamba", {}, "attention is not the ordinary one"),
    ],
)
def test_a_model_with_other_attention_is_refused_at_once(
    family: str, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=reason):
        TransformersEngine(tiny(family, **changes), (), max_context=128)


def test_an_attention_that_is_off_by_a_little_is_refused_too() -> None:
    def sharper(module, query, key, value, mask, scaling, **more):  # type: ignore[no-untyped-def]
        return sdpa_attention_forward(module, query, key, value, mask, scaling=1.1 * scaling, **more)

    AttentionInterface.register("sharper", sharper)
    model = tiny("qwen3")
    model.set_attn_implementation("sharper")
    with pytest.raises(ValueError, match="attention is not the ordinary one"):
        TransformersEngine(model, (), max_context=128)
