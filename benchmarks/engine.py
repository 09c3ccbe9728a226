"""Tokens a second of the transformers engine beside `generate` of transformers, on one CPU thread.

    python benchmarks/engine.py [--requests 1 8 64] [--repeats 3]

Both sample from the same random Llama (4 layers, hidden 128, vocabulary 512, float32), in the same process,
turn about; the best of the repeats counts. Prompts are ragged (16 to 96 tokens). In the first table every
request samples 64 tokens, which suits `generate`; in the second 8 to 120, where `generate` has to run the
batch until the longest is done.
"""

import argparse
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_rollart.generate.engine import Request
from hpc_rollart.generate.transformers_engine import TransformersEngine
from hpc_rollart.messages import Sampling

VOCABULARY = 512


def tiny_llama() -> LlamaForCausalLM:
    """The model of all rows, the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def engine_seconds(engine: TransformersEngine, prompts: list[np.ndarray], lengths: list[int]) -> float:
    """Seconds until every request has its tokens."""
    began = time.process_time()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        engine.add(Request(i, 0, prompt, Sampling(max_tokens=length), seed=i))
    sampled = 0
    while engine.has_work():
        sampled += engine.step().sampled
    seconds = time.process_time() - began
    assert sampled == sum(lengths)
    for i in range(len(prompts)):
        engine.end(i)
    return seconds


@torch.inference_mode()
def generate_seconds(model: LlamaForCausalLM, prompts: list[np.ndarray], lengths: list[int]) -> float:
    """Seconds of one left-padded batch, run until its longest request is done."""
    began = time.process_time()
    width = max(prompt.size for prompt in prompts)
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - prompt.size :] = torch.from_numpy(prompt)
        mask[row, width - prompt.size :] = 1
    model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(lengths))
    return time.process_time() - began


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peer = tiny_llama()
    engine = TransformersEngine(tiny_llama(), eos_ids=(), max_context=512, max_requests=64)
    for title, shortest, longest in (("64 tokens a request", 64, 64), ("8 to 120 tokens a request", 8, 120)):
        table = Table("requests", "engine tokens/s", "generate tokens/s", "ratio", title=title)
        for count in arguments.requests:
            rng = np.random.default_rng(count)
            prompts = [rng.integers(1, VOCABULARY, n).astype(np.int32) for n in rng.integers(16, 97, count)]
            lengths = rng.integers(shortest, longest + 1, count).tolist()
            ours, theirs = [], []
            for _ in range(arguments.repeats):
                ours.append(engine_seconds(engine, prompts, lengths))
                theirs.append(generate_seconds(peer, prompts, lengths))
            tokens = sum(lengths)
            table.add_row(
                str(count),
                f"{tokens / min(ours):,.0f}",
                f"{tokens / min(theirs):,.0f}",
                f"{min(theirs) / min(ours):.2f}",
            )
        Console().print(table)


if __name__ == "__main__":
    main()
