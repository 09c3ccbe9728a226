"""Text of a trajectory as bytes and back: UTF-8 JSON of ``{"messages": [...], "info": {...}}``."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np


def _plain(value: Any) -> Any:
    """Environments put NumPy scalars and arrays, and now and then stranger things, into their info."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return repr(value)


def encode_text(messages: Sequence[Mapping[str, Any]], info: Mapping[str, Any]) -> bytes:
    """Encode; what JSON has no word for (NaN, infinities) becomes null, unknown objects their repr."""
    document = {"messages": list(messages), "info": dict(info)}
    try:
        return msgspec.json.encode(document, enc_hook=_plain)
    except UnicodeEncodeError:
        # Half an emoji: byte-level tokenizers produce lone surrogates, which only escapes can carry.
        return json.dumps(document, default=_plain).encode()


def decode_text(data: bytes) -> dict[str, Any]:
    """Decode; an empty text is an empty conversation."""
    if not data:
        return {"messages": [], "info": {}}
    document: dict[str, Any] = json.loads(data)
    return document
