"""Turns as tokens: the chat template around what the policy is told, nothing around what it said.

Sampled tokens are never tokenised again (invariant 5), since text that was sampled need not come back as
the same tokens. So a conversation is not rendered whole at each turn: only the tokens that follow the
sampled ones are, which the template tells by difference.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for what the assistant said while the template shows what it puts behind it.
_SAID = "\u241esaid\u241e"
# One turn at a time is tokenised; threads would only get in the way of the environments.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class ChatTokenizer:
    """Tokeniser of conversations in the model's own chat template.

    Parameters
    ----------
    source
        Directory of the model, of which only the tokenizer, the chat template and `generation_config.json`
        are read; or a tokenizer already at hand.

    Attributes
    ----------
    eos_ids : frozenset[int]
        Tokens that end a turn.

    Raises
    ------
    ValueError
        The tokenizer has no chat template, or one that does not show what the assistant said.
    """

    def __init__(self, source: "str | os.PathLike[str] | PreTrainedTokenizerBase") -> None:
        self._tokenizer: Any = _load(Path(source)) if isinstance(source, str | os.PathLike) else source
        if not self._tokenizer.chat_template:
            raise ValueError(
                f"the tokenizer of {self._tokenizer.name_or_path or 'this model'} has no chat template; "
                "use an instruction-tuned model, or put its chat_template.jinja beside the tokenizer"
            )
        behind = self._behind("x")
        declared = _declared_eos(self._tokenizer, source)
        self._end = _turn_end(behind, declared, _special(self._tokenizer))
        turn_end = {behind[self._end - 1]} if self._end else set()
        self.eos_ids: frozenset[int] = frozenset(declared | turn_end)
        self._longest_token = max(map(len, self._tokenizer.get_vocab()))

    def first(self, observation: str) -> list[int]:
        """Tokens of the first prompt, up to where the assistant begins to speak.

        The template may put a system message of its own in front.

        Parameters
        ----------
        observation
            What the policy is told first.
        """
        return self._tokens(self._render([{"role": "user", "content": observation}]))

    def next(self, observation: str, ended_with_eos: bool) -> list[int]:
        """Tokens that follow the sampled ones, up to where the assistant speaks again.

        Parameters
        ----------
        observation
            What the policy is told next.
        ended_with_eos
            Whether the sampled tokens end with one of `eos_ids`. If not (the turn was cut at its limit), the
            token that ends a turn comes first here, as context that nobody sampled.
        """
        behind = self._behind(observation)
        return behind[self._end :] if ended_with_eos else behind

    def can_fit(self, observation: str, max_context: int) -> bool:
        """Whether the text may fit into `max_context` tokens, by its length alone.

        Tokenising megabytes takes seconds, during which the other episodes of the rank would stand still.
        """
        return len(observation) <= max_context * self._longest_token

    def decode(self, ids: list[int]) -> str:
        """Text of sampled tokens, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _behind(self, observation: str) -> list[int]:
        """Tokens the template puts behind what the assistant said, when the user then says `observation`."""
        said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _SAID}]
        text = self._render([*said, {"role": "user", "content": observation}])
        _, found, tail = text.partition(_SAID)
        if not found:
            raise ValueError(
                f"the chat template of {self._tokenizer.name_or_path} leaves out what the assistant said "
                "in earlier turns, so conversations of several turns cannot be told with it"
            )
        return self._tokens(tail)

    def _render(self, messages: list[dict[str, str]]) -> str:
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text

    def _tokens(self, text: str) -> list[int]:
        # The template already wrote the special tokens, a first one included.
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _load(model_dir: Path) -> Any:
    # Imported here: it takes seconds. AutoTokenizer would import torch besides, which nothing here needs.
    if (model_dir / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model_dir, local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


def _declared_eos(tokenizer: Any, source: Any) -> set[int]:
    """End tokens that the tokenizer and the model's generation settings name."""
    declared = {tokenizer.eos_token_id}
    if (
        isinstance(source, str | os.PathLike)
        and (settings := Path(source) / "generation_config.json").is_file()
    ):
        named = json.loads(settings.read_text()).get("eos_token_id")
        declared |= set(named if isinstance(named, list) else [named])
    return declared - {None}


def _special(tokenizer: Any) -> set[int]:
    """Tokens marked as special, which text alone does not make."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _turn_end(behind: list[int], declared: set[int], special: set[int]) -> int:
    """How many tokens behind the assistant's words end its turn; 0 if the template has no such token.

    It is a declared end token if the template writes one there, else the first special one: base models in
    ChatML declare the end of a document, and the template ends turns with another.
    """
    for candidates in (declared, special):
        for position, token in enumerate(behind):
            if token in candidates:
                return position + 1
    return 0
