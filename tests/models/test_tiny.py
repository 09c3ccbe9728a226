"""The tiny policy's tokenizer and weights."""

from pathlib import Path

import torch

from hpc_rollart.models.load import load_model, load_tokenizer
from hpc_rollart.models.tiny import IM_END, IM_START, VOCABULARY, build_model, build_tokenizer

TEXTS = ["left . down O right # up G", "Calculate 12 + 7 - 3.", "the quick brown fox"] * 3


def test_digits_and_grid_symbols_are_single_tokens_wherever_they_stand() -> None:
    tokenizer = build_tokenizer(TEXTS)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("P . O\n. . G\n1234 - 5")]
    assert pieces == ["P", " .", " O", "\n", ".", " .", " G", "\n", "1", "2", "3", "4", " -", " 5"]


def test_any_text_comes_back_unchanged() -> None:
    tokenizer = build_tokenizer(TEXTS)
    for text in ["left right", "  two  spaces ", "naïve 日本語 🙂", "tab\tand\r\nnewline", ""]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_conversation_is_rendered_as_chatml() -> None:
    tokenizer = build_tokenizer(TEXTS)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.convert_tokens_to_ids(IM_START)
    assert ids.count(tokenizer.convert_tokens_to_ids(IM_END)) == 1
    assert tokenizer.eos_token == IM_END


def test_saved_model_and_tokenizer_load_as_any_hugging_face_model(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TEXTS)
    model = build_model(tokenizer, 128, seed=3)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, torch.float32)
    ids = torch.tensor([load_tokenizer(tmp_path).encode("left 12 G")])
    assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    assert loaded.config.max_position_embeddings == 128
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert len(tokenizer) <= VOCABULARY


def test_weights_follow_from_the_seed_and_leave_the_global_generator_alone() -> None:
    tokenizer = build_tokenizer(TEXTS)
    before = torch.get_rng_state()
    a, b, c = (build_model(tokenizer, 64, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], c[k]) for k in a)
