"""Turns as tokens: assembled turn by turn they are the template's conversation, sampled tokens untouched."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hpc_rollart.models.chat import ChatTokenizer

# The templates of the families, shortened to what text conversations use.
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
FAMILIES = {
    "chatml": (CHATML, "<|im_end|>", "<|im_end|>"),
    # A base model's tokenizer declares the end of a document; the template ends turns with another token.
    "chatml-base": (CHATML, "<|endoftext|>", "<|im_end|>"),
    "llama3": (LLAMA3, "<|end_of_text|>", "<|eot_id|>"),
    "qwen3": (QWEN3, "<|im_end|>", "<|im_end|>"),
    "zephyr": (ZEPHYR, "</s>", "</s>"),
}
SPECIAL = ["<|begin_of_text|>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"]
ENDS = ["<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "</s>"]


def tokenizer_of(template: str | None, eos: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the spot."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL + ENDS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(["left down right up user\nassistant\nsystem\n the board is\n"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<|begin_of_text|>", eos_token=eos, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = template
    return tokenizer


CASES = {name: (tokenizer_of(template, eos), end) for name, (template, eos, end) in FAMILIES.items()}
WHOLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), max_size=30)


@pytest.mark.parametrize("family", list(FAMILIES))
@given(observations=st.lists(WHOLE, min_size=1, max_size=4), says=st.lists(WHOLE, min_size=3, max_size=3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_turn_by_turn_gives_the_tokens_of_the_whole_conversation(
    family: str, observations: list[str], says: list[str]
) -> None:
    tokenizer, end = CASES[family]
    chat = ChatTokenizer(tokenizer)
    # A template that trims or cuts what was said tells another conversation than the one that took place.
    says = [text.strip() for text in says]
    messages = [{"role": "user", "content": observations[0]}]
    ids = chat.first(observations[0])
    for said, observation in zip(says, observations[1:], strict=False):
        ids += tokenizer(said, add_special_tokens=False)["input_ids"] + tokenizer.convert_tokens_to_ids([end])
        ids += chat.next(observation, ended_with_eos=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": observation}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == whole
    # White space at a border may be cut into tokens in another way when the text is whole; elsewhere the
    # tokens are the same.
    if not any(text != text.strip() or not text for text in (*says, *observations)):
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_turn_cut_at_its_limit_is_ended_by_the_template(family: str) -> None:
    tokenizer, end = CASES[family]
    chat = ChatTokenizer(tokenizer)
    ended, cut = chat.next("board", ended_with_eos=True), chat.next("board", ended_with_eos=False)
    assert cut == [tokenizer.convert_tokens_to_ids(end), *ended]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_turn_ends_at_the_templates_token_or_a_declared_one(family: str) -> None:
    tokenizer, end = CASES[family]
    expected = {tokenizer.convert_tokens_to_ids(end), tokenizer.eos_token_id}
    if family == "llama3":
        # It declares the end of a text, and the template does not write it.
        assert expected == set(tokenizer.convert_tokens_to_ids(["<|end_of_text|>", "<|eot_id|>"]))
    assert ChatTokenizer(tokenizer).eos_ids == expected


def test_a_template_of_plain_text_works_though_nothing_in_it_ends_a_turn() -> None:
    tokenizer = tokenizer_of(PLAIN, "</s>")
    chat = ChatTokenizer(tokenizer)
    assert tokenizer.decode(chat.first("hello")) == "user: hello\nassistant: "
    assert tokenizer.decode(chat.next("more", True)) == "\nuser: more\nassistant: "
    assert chat.eos_ids == {tokenizer.eos_token_id}


def test_the_templates_own_system_message_comes_first() -> None:
    tokenizer, _ = CASES["chatml"]
    assert "named SmolLM" in tokenizer.decode(ChatTokenizer(tokenizer).first("x"))


def test_an_observation_that_quotes_an_earlier_one_is_told_as_it_is() -> None:
    tokenizer, _ = CASES["chatml"]
    chat = ChatTokenizer(tokenizer)
    assert "\u241esaid\u241e" in tokenizer.decode(chat.next("a \u241esaid\u241e b", True))


def test_decoding_leaves_out_special_tokens_and_survives_broken_bytes() -> None:
    tokenizer, _ = CASES["chatml"]
    chat = ChatTokenizer(tokenizer)
    right = tokenizer(" right", add_special_tokens=False)["input_ids"]
    assert chat.decode([*right, tokenizer.eos_token_id]) == " right"
    assert chat.decode(tokenizer("é", add_special_tokens=False)["input_ids"][:1]) == "\ufffd"
    assert chat.decode([]) == ""


def test_it_loads_from_a_model_directory_with_its_generation_settings(tmp_path: Path) -> None:
    tokenizer, _ = CASES["llama3"]
    tokenizer.save_pretrained(tmp_path)
    extra = tokenizer.convert_tokens_to_ids("</s>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [extra]}))
    loaded, direct = ChatTokenizer(tmp_path), ChatTokenizer(tokenizer)
    assert loaded.eos_ids == direct.eos_ids | {extra}
    assert loaded.first("x") == direct.first("x")
    assert loaded.next("x", False) == direct.next("x", False)


def test_loading_from_a_directory_imports_no_torch(tmp_path: Path) -> None:
    CASES["chatml"][0].save_pretrained(tmp_path)
    code = (
        "import sys; from hpc_rollart.models.chat import ChatTokenizer; "
        "ChatTokenizer(sys.argv[1]).first('x'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


def test_a_tokenizer_without_a_template_is_refused_with_the_mend() -> None:
    with pytest.raises(
        ValueError, match=r"no chat template; use an instruction-tuned model, or put its chat_temp"
    ):
        ChatTokenizer(tokenizer_of(None, "</s>"))


def test_a_template_that_forgets_earlier_answers_is_refused() -> None:
    forgetful = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="leaves out what the assistant said"):
        ChatTokenizer(tokenizer_of(forgetful, "</s>"))


def test_a_text_too_long_for_the_context_is_known_by_its_length_alone() -> None:
    tokenizer, _ = CASES["chatml"]
    chat = ChatTokenizer(tokenizer)
    assert not chat.can_fit("x y " * 2_500_000, 512)
    longest = max(tokenizer.get_vocab(), key=len)
    for text in ("", "a board", longest * 20):
        assert chat.can_fit(text, len(chat.first(text)))
