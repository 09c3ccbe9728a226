"""What one bucket looks like on the wire: its bytes, then a trailer that proves them.

The checksum travels with the data, so nothing that overtakes or mixes messages can pair the two wrongly.
"""

import struct

import torch
import xxhash

_TRAILER = struct.Struct("<qiQ")
TRAILER_BYTES = 64
"""`_TRAILER`, padded so that buffers stay aligned."""


def seal(buffer: torch.Tensor, version: int, index: int) -> None:
    """Write the trailer of a packed bucket: int64 version, int32 index, uint64 XXH3 of the bytes."""
    view = buffer.numpy().data
    checksum = xxhash.xxh3_64_intdigest(view[:-TRAILER_BYTES])
    _TRAILER.pack_into(view, len(view) - TRAILER_BYTES, version, index, checksum)


def fault(buffer: torch.Tensor, version: int, index: int) -> str:
    """What is wrong with a received bucket; empty when it is bucket `index` of `version`, whole."""
    view = buffer.numpy().data
    got_version, got_index, checksum = _TRAILER.unpack_from(view, len(view) - TRAILER_BYTES)
    if (got_version, got_index) != (version, index):
        return f"bucket {index} of version {version} came as bucket {got_index} of version {got_version}"
    if xxhash.xxh3_64_intdigest(view[:-TRAILER_BYTES]) != checksum:
        return f"the checksum of bucket {index} of version {version} does not match its bytes"
    return ""
