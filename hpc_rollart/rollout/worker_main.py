"""What runs in a worker process: one environment, asked over a socket, its answers checked on the spot."""

import math
import random
import socket
import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.random  # NumPy loads it on first use; here it is loaded once, before workers are forked.

from envs_cpu.api import TextEnv
from envs_cpu.registry import make
from hpc_rollart.rollout.worker_wire import (
    HEADER,
    MAX_FRAME,
    Observed,
    Raised,
    Reply,
    Request,
    Reset,
    StepResult,
    decode_request,
    frame,
    receive,
)

_REASON_CHARS = 300
_MAX_DEPTH = 32


class _BadObservation(Exception):
    """The environment returned something that is not what its protocol says."""


class Host:
    """Holds the environment between requests, so that the next episode of the same task reuses it."""

    def __init__(self) -> None:
        self.env: TextEnv | None = None
        self.made_from: tuple[str, dict[str, Any]] | None = None

    def answer(self, request: Request) -> Reply:
        """Do what is asked; whatever the environment raises becomes a `Raised`."""
        verb = "reset" if isinstance(request, Reset) else "step"
        try:
            if isinstance(request, Reset):
                return Observed(_text(self._environment(request).reset(request.seed)))
            if self.env is None:
                raise RuntimeError("step before reset")
            return _step_result(self.env.step(request.text))
        except _BadObservation as error:
            return Raised("bad_observation", f"{verb} returned {error}")
        # SystemExit and KeyboardInterrupt included: an environment's exit() is its failure, not ours.
        except BaseException as error:
            traceback.print_exc()
            return Raised(f"{verb}_error", one_line(error))

    def close(self) -> None:
        """Close the environment; its errors go to the log, nobody waits for them."""
        if self.env is not None:
            self.env.close()
            self.env = None

    def _environment(self, request: Reset) -> TextEnv:
        wanted = (request.env, request.args)
        if self.env is None or self.made_from != wanted:
            self.close()
            self.env = make(request.env, **request.args)
            self.made_from = wanted
        # An environment that draws from the global generators is then reproducible too.
        random.seed(request.seed)
        np.random.seed(request.seed % 2**32)
        return self.env


def serve(sock: socket.socket) -> None:
    """Answer requests until the env rank closes the socket, then close the environment."""
    host = Host()
    while (header := receive(sock, HEADER.size)) is not None:
        body = receive(sock, *HEADER.unpack(header))
        if body is None:
            break
        reply = frame(host.answer(decode_request(body)))
        if len(reply) > MAX_FRAME:
            reply = frame(
                Raised("bad_observation", f"an answer of {len(reply) / 2**20:.0f} MiB is too large")
            )
        try:
            sock.sendall(reply)
        except BrokenPipeError:
            break
    host.close()


def one_line(error: BaseException) -> str:
    """`ValueError: what it said`, on one line."""
    said = " ".join(str(error).split())
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 3] + "..."


def jsonable(value: Any, depth: int = 0) -> Any:
    """`value` in JSON's own types: arrays become lists, numbers that JSON lacks and other objects text."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return jsonable(value.tolist(), depth + 1)
    if isinstance(value, int):
        # What msgpack and most readers of JSON can hold.
        return int(value) if -(2**63) <= value < 2**64 else str(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if depth < _MAX_DEPTH:
        if isinstance(value, Mapping):
            return {str(jsonable(str(k))): jsonable(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [jsonable(v, depth + 1) for v in value]
    return jsonable(repr(value)[:_REASON_CHARS])


def _step_result(returned: Any) -> StepResult:
    if not isinstance(returned, tuple) or len(returned) != 5:
        raise _BadObservation(f"{_short(returned)}, not (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = returned
    text = _text(observation)
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise _BadObservation(f"reward {_short(reward)}, not a finite number")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise _BadObservation(f"{name} {_short(flag)}, not a bool")
    if not isinstance(info, Mapping):
        raise _BadObservation(f"info {_short(info)}, not a dict")
    return StepResult(text, number, bool(terminated), bool(truncated), jsonable(info))


def _text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise _BadObservation(f"observation {_short(observation)}, not a str")
    # Half of a surrogate pair cannot be encoded, so no tokeniser and no file could take it.
    return observation.encode(errors="replace").decode()


def _short(value: Any) -> str:
    return f"{' '.join(repr(value).split())[:80]} ({type(value).__name__})"
