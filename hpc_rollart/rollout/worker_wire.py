"""What travels between an env rank, its worker server and its workers: typed structs, never pickles.

A worker's stream carries frames of a 4-byte little-endian length and msgpack; the server's control socket
keeps message boundaries by itself (SOCK_SEQPACKET), so its messages need no length.
"""

import socket
import struct
from typing import Any, TypeAlias

import msgspec

HEADER = struct.Struct("<I")
# Larger than any observation a policy could read; a length beyond it means the stream is not ours any more.
MAX_FRAME = 64 * 2**20
CONTROL_BYTES = 64 * 1024
# Exit code of a worker server some of whose workers survived SIGKILL.
WORKERS_LEFT = 3


class _Wire(msgspec.Struct, tag=True):
    """Base of all structs here; the class name is the tag."""


# --- env rank -> worker ----------------------------------------------------------------------------


class Reset(_Wire):
    """Make the environment, unless it is the one at hand, and begin an episode."""

    env: str
    args: dict[str, Any]
    seed: int


class Step(_Wire):
    """Act."""

    text: str


# --- worker -> env rank ----------------------------------------------------------------------------


class Observed(_Wire):
    """What `reset` returned."""

    observation: str


class StepResult(_Wire):
    """What `step` returned, checked: a finite reward, and an `info` that is JSON."""

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Raised(_Wire):
    """The environment failed; `stop` is a cause as the shard names it, `reason` one line."""

    stop: str
    reason: str


# --- env rank -> worker server ---------------------------------------------------------------------


class Spawn(_Wire):
    """Fork a worker that talks on the socket sent along; `env` may be imported beforehand."""

    worker: int
    env: str


class Kill(_Wire):
    """Kill the worker and every process in its session."""

    worker: int


# --- worker server -> env rank ---------------------------------------------------------------------


class Up(_Wire):
    """The server is ready to fork."""

    pid: int


class Spawned(_Wire):
    """The worker runs."""

    worker: int
    pid: int


class Exited(_Wire):
    """The worker is gone and reaped; `reason` says how, in a few words."""

    worker: int
    reason: str


Request: TypeAlias = Reset | Step
Reply: TypeAlias = Observed | StepResult | Raised

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_order = msgspec.msgpack.Decoder(Spawn | Kill).decode
decode_event = msgspec.msgpack.Decoder(Up | Spawned | Exited).decode


def frame(message: Request | Reply) -> bytes:
    """A message as it is sent on a worker's stream."""
    body = encode(message)
    return HEADER.pack(len(body)) + body


def receive(sock: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes from a blocking socket; None if the other side has closed it."""
    buffer = bytearray(count)
    view, filled = memoryview(buffer), 0
    while filled < count:
        got = sock.recv_into(view[filled:])
        if not got:
            return None
        filled += got
    return bytes(buffer)
