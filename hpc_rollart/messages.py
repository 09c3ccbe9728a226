"""Every message that one role sends another, as typed structs.

Control travels as small structs; token arrays are `numpy.ndarray` fields, which the mailbox sends as
buffers of their own, never copied through the encoder. The coordinator sees tickets, counts and
versions only: no message to or from it holds a token array.
"""

from typing import Any, Literal

import msgspec
import numpy as np

FailedAs = Literal["env_failed", "reward_failed", "lost"]
"""Whose failure it was: the environment's, the scorer's, or that of a rank that died."""


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of all messages; the class name is the tag on the wire."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are drawn.

    Attributes
    ----------
    temperature
        Divides the logits; 0 takes the most likely token.
    top_p, top_k
        Nucleus and top-k truncation; 1.0 and 0 leave the distribution whole.
    max_tokens
        At most this many tokens are sampled in one turn.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64


# --- all roles <-> coordinator ---------------------------------------------------------------------


class Hello(Message):
    """A rank is up and ready for work."""


class Stop(Message):
    """Finish what must be finished (shards, logs) and leave.

    `reason` is `done`, `interrupted` or `failed`.
    """

    reason: str


class StopAsked(Message):
    """A rank got a signal to stop: end the run in good order."""


class Alive(Message):
    """A rank's sign of life, every few seconds from its `Hello` on."""


class Bye(Message):
    """The rank has flushed everything and will now finalize."""


class Fatal(Message):
    """The rank cannot go on; the run fails with this message."""

    error: str


# --- coordinator <-> env ranks ---------------------------------------------------------------------


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to run one trajectory.

    Attributes
    ----------
    trajectory, group, member, attempt
        Identity; `attempt` counts the replacements of a failed member.
    task
        Index into the config's `tasks`.
    env_seed
        Seed of the environment's reset, the same for the whole group.
    sample_seed
        Seed of the sampled tokens, one of its own for each member and attempt.
    pool, generator
        Pool index and world rank of the replica that serves every turn of it.
    t_admitted
        Unix seconds.
    """

    trajectory: int
    group: int
    member: int
    attempt: int
    task: int
    env_seed: int
    sample_seed: int
    pool: int
    generator: int
    t_admitted: float


class FreeSlots(Message):
    """Env rank: `count` more episodes could run here (credits add up)."""

    count: int


class Admit(Message):
    """Coordinator to env rank: run these."""

    tickets: list[Ticket]


class Finished(Message):
    """An episode ended and was scored; its tokens wait on the env rank."""

    trajectory: int
    reward: float
    turns: int
    sampled: int
    start_version: int


class Failed(Message):
    """An episode failed; its row is written, its slot is free."""

    trajectory: int
    status: FailedAs
    reason: str


class Cancel(Message):
    """Coordinator to env rank: end (in flight) or drop (finished) these, with that status."""

    trajectories: list[int]
    status: str


class Cancelled(Message):
    """Env rank: these ended without being trained on; each has its row."""

    trajectories: list[int]


# --- env ranks <-> generators ----------------------------------------------------------------------


class Generate(Message):
    """Sample one turn after `tokens` (int32, shape (T,), the whole context so far)."""

    trajectory: int
    turn: int
    tokens: np.ndarray
    sampling: Sampling
    seed: int


class Generated(Message):
    """One sampled turn: `tokens` int32, `logprobs` float32, `versions` int32, each of shape (S,).

    `stop` is `eos`, `max_tokens` or `max_context`. A request that was aborted is never answered.
    """

    trajectory: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    stop: str
    seconds: float


class EndRequest(Message):
    """The trajectory is over (or aborted): free its engine slot and its KV cache at once."""

    trajectory: int


# --- generators -> coordinator ---------------------------------------------------------------------


class Started(Message):
    """These trajectories sampled their first token, under `version`."""

    trajectories: list[int]
    version: int


class Installed(Message):
    """A generator now serves `version`.

    `exposed_s` is how long it served nothing: from suspend to resume.
    """

    version: int
    exposed_s: float


class MayInstall(Message):
    """Coordinator to generators: `version` may be installed (only in `one_off` mode, when drained)."""

    version: int


# --- trainer <-> coordinator, env ranks ------------------------------------------------------------


class NextBatch(Message):
    """Trainer asks for the batch of `step`; answered when it is complete, or with `NotYet` after a while."""

    step: int


class NotYet(Message):
    """The coordinator is well and there is no batch yet: ask again."""


class BatchItem(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory of a batch and the env rank that holds its tokens."""

    trajectory: int
    group: int
    task: int
    env_rank: int
    reward: float
    start_version: int
    staleness: int


class Batch(Message):
    """What step `step` trains on, from weight version `version`; in order of group, then member.

    `resume` is what the coordinator would go on from after this step, as JSON: part of its checkpoint.
    """

    step: int
    version: int
    items: list[BatchItem]
    resume: bytes = b""


class Fetch(Message):
    """Trainer asks an env rank for trajectories it holds; they are released when answered."""

    trajectories: list[int]


class Trajectories(Message):
    """Tokens of several trajectories, concatenated in the order asked.

    `counts` int64 (N,); `tokens` int32 (T,), `logprobs` float32 (T,), `versions` int32 (T,),
    `sampled` uint8 (T,): the columns of `/tokens` in the shard schema.
    """

    trajectories: list[int]
    counts: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    sampled: np.ndarray


class StepDone(Message):
    """Trainer finished step `step`; `metrics` are the trainer's numbers for that line of metrics.jsonl."""

    step: int
    metrics: dict[str, Any]


class Sync(Message):
    """Trainer to coordinator and env ranks, before a checkpoint: put what you were told or have on disk.

    All messages sent before are dealt with by then, so the checkpoint's steps have their lines and rows.
    """


class Synced(Message):
    """It is on disk."""


# --- trainer <-> generators: weights ----------------------------------------------------------------


class Publish(Message):
    """Trainer to generators: the buckets of `version` follow on the weights communicator."""

    version: int
    attempt: int = 0


class Received(Message):
    """Generator to trainer: all buckets of `version` are staged (`ok`) or the checksum failed."""

    version: int
    attempt: int
    ok: bool
    error: str = ""


AnyMessage = (
    Hello | Stop | StopAsked | Alive | Bye | Fatal
    | FreeSlots | Admit | Finished | Failed | Cancel | Cancelled
    | Generate | Generated | EndRequest
    | Started | Installed | MayInstall
    | NextBatch | NotYet | Batch | Fetch | Trajectories | StepDone | Sync | Synced
    | Publish | Received
)  # fmt: skip
"""All that may travel; the mailbox refuses anything else."""
