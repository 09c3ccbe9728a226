"""Continuous batching for any transformers decoder with ordinary attention, light enough for a CPU."""

import time
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from hpc_rollart.generate.engine import Completion, Request, StepResult, StopReason
from hpc_rollart.generate.kv_cache import ATTENTION, Chunk, Pack, RowCache, SavedKV
from hpc_rollart.generate.sampling import Draws, sample
from hpc_rollart.generate.weights import copy_weights

_UINT64 = (1 << 64) - 1


@dataclass(eq=False)
class _Running:
    """A request that holds a row of the cache (its index in the list of running requests).

    `tokens[:length]` is context and samples, of which the first `computed` have their KV in the row. So
    one pending token means decoding, more mean prefilling; the newest sample is always pending, and the
    next token is drawn from whatever weights are installed when that one goes through the model.
    """

    request: Request
    tokens: np.ndarray
    length: int
    order: int
    t_added: float
    computed: int = 0
    recompute_below: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def pending(self) -> int:
        return self.length - self.computed


@dataclass(eq=False)
class _Idle:
    """KV of `tokens`, kept for the next turn of a trajectory that has no request."""

    tokens: np.ndarray
    kv: SavedKV


class TransformersEngine:
    """An `Engine` over a transformers causal language model.

    A step takes one token of every decoding request and up to `prefill_tokens` of contexts still to be
    computed (first come, first served), so a long context delays the others by a bounded amount a step.

    The KV of a finished turn is kept for the trajectory's next one, whose context begins with it. Running
    requests and idle trajectories together have `max_requests` places; the idle trajectory that was used
    least recently goes first.

    Parameters
    ----------
    model
        Belongs to the engine until `close`: it is put into eval mode and its attention is replaced.
    eos_ids
        Token ids that end a turn.
    max_context
        Most tokens of a trajectory, samples included.
    max_requests
        Most requests that run at once; more wait in a queue.
    prefill_tokens
        Context tokens processed in one step.
    deterministic
        Make tokens and log-probs of a request bit-identical whatever it runs beside. Every request then
        goes through the model alone, in chunks that start at multiples of `prefill_tokens`, and no KV is
        kept between turns, for what is left of it would depend on evictions and so on the other requests.

    Raises
    ------
    NotImplementedError
        If the model has attention that the engine does not offer.
    ValueError
        If the engine's log-probs differ from the model's own, tried on a short context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_ids: Collection[int],
        max_context: int,
        max_requests: int = 64,
        prefill_tokens: int = 2048,
        deterministic: bool = False,
    ) -> None:
        if min(max_context, max_requests, prefill_tokens) < 1:
            raise ValueError(f"{max_context=}, {max_requests=} and {prefill_tokens=} must all be at least 1")
        self.version = 0
        self._model = model.eval()
        self._device, self._dtype = model.device, model.dtype
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        self._vocabulary = embeddings.num_embeddings
        self._eos = frozenset(int(i) for i in eos_ids)
        self._max_context = max_context
        self._max_requests = max_requests
        self._prefill_tokens = prefill_tokens
        self._deterministic = deterministic
        self._cache = RowCache(max_requests, max_context)
        self._waiting: OrderedDict[int, tuple[Request, float]] = OrderedDict()
        self._running: list[_Running] = []
        self._idle: OrderedDict[int, _Idle] = OrderedDict()
        self._full: list[Completion] = []
        self._admitted = 0
        self._own_attention: str = model.config._attn_implementation
        self._adopt_attention()

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def idle(self) -> int:
        """Trajectories without a request whose KV is kept."""
        return len(self._idle)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._running or self._waiting or self._full)

    def add(self, request: Request) -> None:
        """Queue a request; see `Engine.add`."""
        who = f"trajectory {request.trajectory}, turn {request.turn}"
        tokens, sampling = request.tokens, request.sampling
        if tokens.ndim != 1 or not tokens.size:
            raise ValueError(f"{who}: the context must be a non-empty vector, not of shape {tokens.shape}")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            wrong = tokens[(tokens < 0) | (tokens >= self._vocabulary)][0]
            raise ValueError(f"{who}: token id {wrong} is outside the vocabulary of {self._vocabulary}")
        if not sampling.temperature >= 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise ValueError(f"{who}: need temperature >= 0, 0 < top_p <= 1 and top_k >= 0, got {sampling}")
        if sampling.max_tokens < 1:
            raise ValueError(f"{who}: max_tokens must be at least 1, got {sampling.max_tokens}")
        if request.trajectory in self._waiting or self._find(request.trajectory) is not None:
            raise ValueError(f"{who}: the trajectory already has a request in this engine")
        if tokens.size >= self._max_context:
            self._idle.pop(request.trajectory, None)
            empty = np.empty(0, np.int32)
            self._full.append(
                Completion(
                    request.trajectory,
                    request.turn,
                    tokens=empty,
                    logprobs=empty.astype(np.float32),
                    versions=empty,
                    stop="max_context",
                    seconds=0.0,
                )
            )
            return
        if request.trajectory in self._idle:
            self._idle.move_to_end(request.trajectory)
        self._waiting[request.trajectory] = (request, time.perf_counter())

    @torch.inference_mode()
    def abort(self, trajectory: int) -> None:
        """Forget a trajectory's request and KV; see `Engine.abort`."""
        self._full = [done for done in self._full if done.trajectory != trajectory]
        self._waiting.pop(trajectory, None)
        self._idle.pop(trajectory, None)
        row = self._find(trajectory)
        if row is not None:
            self._free(row)

    def end(self, trajectory: int) -> None:
        """Drop what is kept for a trajectory without a request; see `Engine.end`."""
        self._idle.pop(trajectory, None)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Run the model once; see `Engine.step`.

        Raises
        ------
        FloatingPointError
            If the weights give logits that are not finite.
        """
        result = StepResult(completions=self._full)
        self._full = []
        self._admit()
        decoding = [row for row, run in enumerate(self._running) if run.pending == 1]
        prefilling = self._next_chunks()
        sampled: list[tuple[_Running, int, float]] = []
        if self._deterministic:
            for row in decoding:
                sampled += self._forward([row], [], result)
            for chunk in prefilling:
                sampled += self._forward([], [chunk], result)
        elif decoding or prefilling:
            sampled = self._forward(decoding, prefilling, result)
        for run, token, logprob in sampled:
            self._append(run, token, logprob, result)
        return result

    def install(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace the weights; see `Engine.install` and `copy_weights`."""
        copy_weights(self._model, tensors, version)
        self.version = version

    def recompute(self) -> int:
        """Forget all KV, so that the next steps rebuild it; see `Engine.recompute`.

        Idle trajectories lose theirs. Running requests go back to prefilling, in the order in which they
        were admitted, before any that were admitted later; they stay abortable all the while, and
        `StepResult.recomputed` counts what they cost.
        """
        self._idle.clear()
        for run in self._running:
            run.recompute_below = max(run.recompute_below, run.computed)
            run.computed = 0
        return sum(run.recompute_below for run in self._running)

    def close(self) -> None:
        """Release the cache and give the model its own attention back."""
        self._waiting.clear()
        self._running.clear()
        self._idle.clear()
        self._full.clear()
        self._cache.clear()
        self._model.set_attn_implementation(self._own_attention)

    def _find(self, trajectory: int) -> int | None:
        for row, run in enumerate(self._running):
            if run.request.trajectory == trajectory:
                return row
        return None

    def _admit(self) -> None:
        """Give free rows to waiting requests, first come first served."""
        while self._waiting and len(self._running) < self._max_requests:
            trajectory, (request, t_added) = self._waiting.popitem(last=False)
            idle = self._idle.pop(trajectory, None)
            if len(self._running) + len(self._idle) == self._max_requests:
                self._idle.popitem(last=False)
            length = request.tokens.size
            tokens = np.empty(min(length + request.sampling.max_tokens, self._max_context), np.int64)
            tokens[:length] = request.tokens
            run = _Running(request, tokens, length, self._admitted, t_added)
            self._admitted += 1
            self._running.append(run)
            if idle is not None:
                # At least one token must go through the model, for its logits.
                run.computed = min(_common_prefix(idle.tokens, request.tokens), length - 1)
                self._cache.reserve(len(self._running), run.computed)
                self._cache.restore(len(self._running) - 1, idle.kv, run.computed)

    def _next_chunks(self) -> list[tuple[int, int]]:
        """(row, tokens) of the contexts to go on with, within one step's budget."""
        budget = self._prefill_tokens
        chunks = []
        prefilling = [row for row, run in enumerate(self._running) if run.pending > 1]
        for row in sorted(prefilling, key=lambda row: self._running[row].order):
            if budget <= 0:
                break
            # A deterministic chunk must not depend on what the budget was spent on before.
            most = self._prefill_tokens if self._deterministic else budget
            count = min(self._running[row].pending, most)
            chunks.append((row, count))
            budget -= count
        return chunks

    def _forward(
        self, decoding: list[int], prefilling: list[tuple[int, int]], result: StepResult
    ) -> list[tuple[_Running, int, float]]:
        """Run the model on a pack; (request, token, log-prob) of those whose context is now complete."""
        runs = self._running
        pieces = [np.array([runs[row].tokens[runs[row].computed] for row in decoding], np.int64)]
        chunks = []
        offset = len(decoding)
        for row, count in prefilling:
            start = runs[row].computed
            chunks.append(Chunk(row, start, start + count, offset))
            pieces.append(runs[row].tokens[start : start + count])
            offset += count
        positions = [runs[row].computed for row in decoding]
        ready = [runs[row] for row in decoding]
        outputs = list(range(len(decoding)))
        for chunk in chunks:
            if chunk.stop == runs[chunk.row].length:
                ready.append(runs[chunk.row])
                outputs.append(chunk.offset + chunk.stop - chunk.start - 1)
        logits = self._logits(np.concatenate(pieces), decoding, positions, chunks, outputs)
        for row, start, stop in [
            *((row, position, position + 1) for row, position in zip(decoding, positions, strict=True)),
            *((chunk.row, chunk.start, chunk.stop) for chunk in chunks),
        ]:
            run = runs[row]
            run.computed = stop
            result.recomputed += max(0, min(stop, run.recompute_below) - start)
            if stop >= run.recompute_below:
                run.recompute_below = 0
        result.processed += offset
        if not ready:
            return []
        tokens, logprobs = sample(logits, _draws(ready))
        if not np.isfinite(logprobs).all():
            bad = ready[int(np.flatnonzero(~np.isfinite(logprobs))[0])].request
            raise FloatingPointError(
                f"weights of version {self.version} give logits that are not finite "
                f"(trajectory {bad.trajectory}, turn {bad.turn})"
            )
        return list(zip(ready, tokens.tolist(), logprobs.tolist(), strict=True))

    def _logits(
        self,
        tokens: np.ndarray,
        rows: list[int],
        positions: list[int],
        chunks: list[Chunk],
        outputs: list[int],
    ) -> torch.Tensor:
        """Logits, (len(outputs), vocabulary), after the tokens at the indices `outputs` of the pack."""
        device = self._device
        last = max([position + 1 for position in positions] + [chunk.stop for chunk in chunks])
        last_row = max(rows + [chunk.row for chunk in chunks])
        self._cache.reserve(last_row + 1, last)
        pack = Pack(self._cache, rows, positions, chunks, device, self._dtype)
        places = np.concatenate(
            [np.array(positions, np.int64)] + [np.arange(chunk.start, chunk.stop) for chunk in chunks]
        )
        output = self._model(
            input_ids=torch.from_numpy(tokens).to(device)[None],
            position_ids=torch.from_numpy(places).to(device)[None],
            use_cache=False,
            logits_to_keep=torch.tensor(outputs, dtype=torch.long, device=device),
            pack=pack,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _append(self, run: _Running, token: int, logprob: float, result: StepResult) -> None:
        """Record a sampled token, and complete the request if it is the last."""
        if not run.versions and run.request.turn == 0:
            result.first_tokens.append((run.request.trajectory, self.version))
        run.tokens[run.length] = token
        run.length += 1
        run.logprobs.append(logprob)
        run.versions.append(self.version)
        result.sampled += 1
        stop: StopReason
        if token in self._eos:
            stop = "eos"
        elif len(run.versions) == run.request.sampling.max_tokens:
            stop = "max_tokens"
        elif run.length == self._max_context:
            stop = "max_context"
        else:
            return
        row = self._running.index(run)
        # With the context full there is no next turn to keep anything for.
        if not self._deterministic and run.length < self._max_context:
            kept = _Idle(run.tokens[: run.computed], self._cache.save(row, run.computed))
            self._idle[run.request.trajectory] = kept
        self._free(row)
        result.completions.append(
            Completion(
                run.request.trajectory,
                run.request.turn,
                tokens=run.tokens[run.request.tokens.size : run.length].astype(np.int32),
                logprobs=np.array(run.logprobs, np.float32),
                versions=np.array(run.versions, np.int32),
                stop=stop,
                seconds=time.perf_counter() - run.t_added,
            )
        )

    def _free(self, row: int) -> None:
        """Take the request off `row`; the last row moves there, so that rows stay dense."""
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last
            if last.computed:  # else its row may not exist yet
                self._cache.move(len(self._running), row, last.computed)

    @torch.inference_mode()
    def _adopt_attention(self) -> None:
        """Replace the model's attention, and try on a short context that nothing but speed has changed."""
        tokens = np.arange(min(6, self._max_context)) % self._vocabulary
        ids = torch.from_numpy(tokens).to(self._device)[None]
        plain = self._model(input_ids=ids, use_cache=False).logits[0, -1].float()
        self._model.set_attn_implementation(ATTENTION)
        split = tokens.size // 2
        for start, stop in ((0, split), (split, tokens.size)):
            if start < stop:
                chunk = Chunk(0, start, stop, 0)
                logits = self._logits(tokens[start:stop], [], [], [chunk], [stop - start - 1])
        worst = (logits[-1].float().log_softmax(-1) - plain.log_softmax(-1)).abs().max().item()
        # Rounding adds up over the layers: SmolLM2-135M, of 30 layers, is off by 0.0003 of the spread of its
        # logits in float32. An attention of another kind is off by about as much as the whole.
        rounding = 4 * torch.finfo(self._dtype).eps * plain.abs().max().item()
        tolerance = 0.01 * plain.std().item() + rounding
        if not worst <= tolerance:
            raise ValueError(
                f"{type(self._model).__name__} cannot run in the transformers engine: its log-probs come out "
                f"different by up to {worst:.3g} ({tolerance:.2g} is allowed in {self._dtype}), so its "
                "attention is not the ordinary one; use a model such as Llama, Qwen3 or SmolLM"
            )


def _draws(runs: list[_Running]) -> Draws:
    settings = [run.request.sampling for run in runs]
    return Draws(
        temperature=np.array([s.temperature for s in settings], np.float32),
        top_p=np.array([s.top_p for s in settings], np.float32),
        top_k=np.array([s.top_k for s in settings], np.int64),
        seed=np.array([run.request.seed & _UINT64 for run in runs], np.uint64),
        position=np.array([run.length for run in runs], np.uint64),
    )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    n = min(a.size, b.size)
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n
