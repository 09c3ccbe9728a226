"""The real SmolLM2-135M-Instruct, as `make model` converts it; the cache is the one `make` uses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpc_rollart.config import load
from hpc_rollart.models import cache
from hpc_rollart.models.load import load_model, load_tokenizer

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "smollm2.yaml"


@pytest.fixture(scope="module")
def folder() -> Path:
    """The converted model; fails with the command to install its package when that is missing."""
    config = load(CONF)
    return cache.resolve(config.model, config.tasks)


def test_smollm2_answers_a_sum(folder: Path) -> None:
    tokenizer, model = load_tokenizer(folder), load_model(folder, torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = prompt["input_ids"]
    answer = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert "12" in tokenizer.decode(answer)


def test_smollm2_trains_for_two_steps_with_its_own_chat_template(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "hpc_rollart", "run", str(CONF), "--dir", str(run), "-o", "run.steps=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert (run / "checkpoints" / "step-000002" / "model.safetensors").is_file()
