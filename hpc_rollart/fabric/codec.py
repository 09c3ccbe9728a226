"""Turns typed messages into frames and back, with large arrays kept out of the encoder.

A frame is a fixed head, the size of each array that travels apart, then the message in MessagePack.
Arrays of at most `INLINE_BYTES` are part of the MessagePack; larger ones stay where they are and are
sent from there.
"""

import struct
from typing import Any

import msgspec
import numpy as np

INLINE_BYTES = 8192
"""Copying this much through the encoder costs less than a second MPI message."""

_HEAD = struct.Struct("<qI")
_OBJECT, _VOID = "O", "V"


class Codec:
    """Encoder and decoder of one union of message types.

    Parameters
    ----------
    message_types
        A union of tagged `msgspec.Struct` types. Their fields may be annotated `numpy.ndarray`.
    """

    def __init__(self, message_types: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_extra)
        self._decoder = msgspec.msgpack.Decoder(message_types, dec_hook=self._decode_extra)
        self._apart: list[np.ndarray] = []

    def encode(self, message: msgspec.Struct, correlation: int) -> tuple[bytes, list[np.ndarray]]:
        """Make a frame of a message.

        Parameters
        ----------
        message
            One of the union's types.
        correlation
            0 for a plain message, n for a request, -n for the reply to it.

        Returns
        -------
        frame, apart
            The frame and the C-contiguous arrays that must be sent after it, in this order.
        """
        apart: list[np.ndarray] = []
        self._apart = apart
        payload = self._encoder.encode(message)
        if not apart:
            return _HEAD.pack(correlation, 0) + payload, apart
        sizes = struct.pack(f"<{len(apart)}Q", *(array.nbytes for array in apart))
        return b"".join((_HEAD.pack(correlation, len(apart)), sizes, payload)), apart

    @staticmethod
    def read_head(frame: bytearray) -> tuple[int, tuple[int, ...]]:
        """Correlation of a frame, and the byte sizes of the arrays that follow it apart."""
        correlation, count = _HEAD.unpack_from(frame)
        return correlation, struct.unpack_from(f"<{count}Q", frame, _HEAD.size) if count else ()

    def decode(self, frame: bytearray, apart: list[np.ndarray]) -> msgspec.Struct:
        """Make the message of a frame; `apart` are its separate arrays as uint8 buffers."""
        self._apart = apart
        message: msgspec.Struct = self._decoder.decode(memoryview(frame)[_HEAD.size + 8 * len(apart) :])
        return message

    def _encode_extra(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a message cannot hold a {type(value).__name__}")
        if value.dtype.kind in (_OBJECT, _VOID):
            raise TypeError(f"a message cannot hold an array of dtype {value.dtype}")
        if value.nbytes <= INLINE_BYTES:
            return value.dtype.str, value.shape, value.tobytes()
        self._apart.append(np.asarray(value, order="C"))
        return value.dtype.str, value.shape, len(self._apart) - 1

    def _decode_extra(self, expected: type, value: Any) -> Any:
        if expected is not np.ndarray:
            raise NotImplementedError(f"a message cannot hold a {expected.__name__}")
        dtype, shape, data = value
        # A copy of an inline array, so that it is writable and aligned like any other.
        flat = self._apart[data] if isinstance(data, int) else np.frombuffer(data, np.uint8).copy()
        return flat.view(dtype).reshape(shape)
