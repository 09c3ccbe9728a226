"""One training step: from a batch of trajectories to an updated policy and the numbers that describe it.

Precision. Parameters and arithmetic are float32, always. With AdamW's usual learning rates one update
moves a weight by about 1e-6, less than half the gap between two neighbouring bfloat16 numbers near most
weights, so bfloat16 parameters would round nearly every update away. And CPUs without bfloat16 units
(AVX512-BF16, AMX) only emulate its arithmetic: a pass over SmolLM2-135M was over ten times slower on AVX2.
A `bfloat16` policy is therefore *published* in bfloat16, from float32 master weights; the truncated
correction accounts for the rounding.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hpc_rollart.models.forward import hidden_states, parameter_groups
from hpc_rollart.models.tensors import published_tensors
from hpc_rollart.train.batch import MicroBatch, Sample, micro_batches
from hpc_rollart.train.checkpoint import read_optimizer, write_checkpoint
from hpc_rollart.train.objective import TokenSums, group_advantages, policy_loss, token_logprobs


@dataclass(frozen=True)
class AlgorithmSettings:
    """What one step does; the config's `algorithm` section, flat.

    Attributes
    ----------
    learning_rate, weight_decay, betas, max_grad_norm
        AdamW and the bound of the gradient's global norm. Norms, biases and embeddings are not decayed.
    warmup_steps
        Updates over which the learning rate rises linearly to `learning_rate`.
    minibatches
        Optimiser updates a batch; it is cut by whole groups.
    clip_low, clip_high, correction_cap, normalise_std
        See `hpc_rollart.train.objective`.
    micro_batch_tokens
        Tokens, padding included, of one forward and backward pass. It bounds memory and changes nothing else.
    """

    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.99)
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    minibatches: int = 1
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction_cap: float = 2.0
    normalise_std: bool = True
    micro_batch_tokens: int = 8192


@dataclass(frozen=True, eq=False)
class StepResult:
    """What `Learner.step` did.

    Attributes
    ----------
    metrics
        `loss`, `grad_norm` (before clipping; both averaged over minibatches), `learning_rate`, `entropy`
        (nats), `clip_fraction`, `correction_mean`, `correction_capped` (fraction of tokens), `kl_behaviour`
        (nats a token), `zero_advantage_groups`, `all_advantages_zero` (1: nothing could be learnt and the
        weights were left alone; worth a warning), `updates` and `skipped_updates` (optimiser updates of this
        step done, and refused because the loss or a gradient was not finite), `tokens` (through the model,
        without padding), `sampled_tokens`, `train_s`.
    advantages
        float32 (N,), in the order of the samples given.
    """

    metrics: dict[str, float | int]
    advantages: np.ndarray


class Learner:
    """A policy, its optimiser and the step that improves it.

    Parameters
    ----------
    model
        Float32 causal language model; it is trained in place, without dropout.
    settings
        The algorithm's numbers.
    publish_dtype
        What `state_for_publish` casts floating-point tensors to: the dtype the engines serve.
    tokenizer
        Saved beside the weights, so that a checkpoint can be used on its own.

    Attributes
    ----------
    updates
        Optimiser updates done since the optimiser was new; the learning rate's warm-up counts these.

    Raises
    ------
    ValueError
        If a parameter is not float32, or if the model computes its logits otherwise than as output
        embeddings of the last hidden state (a soft cap, a scale), which this learner relies on to
        compute them only where they are needed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: AlgorithmSettings,
        *,
        publish_dtype: torch.dtype = torch.float32,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        for name, parameter in model.named_parameters():
            if parameter.dtype != torch.float32:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}; the learner needs float32 master weights"
                )
        self.model = model.eval()
        self.settings = settings
        self.publish_dtype = publish_dtype
        self.tokenizer = tokenizer
        self.updates = 0
        self.optimizer = torch.optim.AdamW(
            parameter_groups(model, settings.weight_decay),
            lr=settings.learning_rate,
            betas=settings.betas,
            fused=True,
        )
        _check_logits_are_plain(model)

    def step(self, samples: Sequence[Sample]) -> StepResult:
        """Train on one batch.

        Parameters
        ----------
        samples
            Whole groups, at least one.

        Returns
        -------
        StepResult
            Metrics over the whole batch, and each trajectory's advantage.
        """
        if not samples:
            raise ValueError("a batch needs at least one trajectory")
        started = time.monotonic()
        settings = self.settings
        groups = np.array([s.group for s in samples])
        advantages, zero_groups = group_advantages(
            np.array([s.reward for s in samples]), groups, normalise_std=settings.normalise_std
        )
        minibatches = [
            self._micro_batches([samples[i] for i in rows], advantages[rows])
            for rows in split_groups(groups, settings.minibatches)
        ]
        proximal = self._proximal(minibatches)

        sums = TokenSums()
        losses, norms = [], []
        updates = skipped = 0
        for i, batches in enumerate(minibatches):
            part, norm, done = self._update(batches, proximal[i] if proximal else None)
            sums.add(part)
            losses.append(part.loss / part.tokens)
            norms.append(norm)
            updates += done is True
            skipped += done is False
        n = sums.tokens
        metrics: dict[str, float | int] = {
            "loss": float(np.mean(losses)),
            "grad_norm": float(np.mean(norms)),
            "learning_rate": self.learning_rate,
            "entropy": sums.entropy / n,
            "clip_fraction": sums.clipped / n,
            "correction_mean": sums.correction / n,
            "correction_capped": sums.capped / n,
            "kl_behaviour": sums.kl / n,
            "zero_advantage_groups": zero_groups,
            "all_advantages_zero": int(not advantages.any()),
            "updates": updates,
            "skipped_updates": skipped,
            "tokens": sum(s.trained_length for s in samples),
            "sampled_tokens": n,
            "train_s": time.monotonic() - started,
        }
        return StepResult(metrics, advantages)

    @property
    def learning_rate(self) -> float:
        """The rate of the latest update, or of the first one to come."""
        warm = max(1, self.settings.warmup_steps)
        return self.settings.learning_rate * min(1.0, max(1, self.updates) / warm)

    def state_for_publish(self) -> dict[str, Tensor]:
        """`published_tensors` of the policy, floating-point ones in `publish_dtype`.

        Returns
        -------
        dict of str to Tensor
            Where no cast is needed a tensor *is* the live weight: copy what must survive the next `step`.
        """
        return {
            name: tensor.to(self.publish_dtype) if tensor.is_floating_point() else tensor
            for name, tensor in published_tensors(self.model).items()
        }

    def save(self, directory: Path, step: int, ledger: bytes | None = None) -> Path:
        """Write the checkpoint of `step` completed steps into `directory`; returns its folder.

        `ledger` is what the coordinator goes on from, as JSON.
        """
        return write_checkpoint(
            directory, step, self.model, self.tokenizer, self.optimizer, self.updates, ledger
        )

    def restore(self, checkpoint: Path) -> int:
        """Take over the optimiser of a checkpoint whose weights `model` was loaded from; returns its step."""
        step, self.updates = read_optimizer(checkpoint, self.model, self.optimizer)
        return step

    def _micro_batches(self, samples: list[Sample], advantages: np.ndarray) -> list[MicroBatch]:
        """Micro-batches with something to learn first; then the rest, which need a forward pass only."""
        budget = self.settings.micro_batch_tokens
        batches: list[MicroBatch] = []
        for wanted in (advantages != 0, advantages == 0):
            rows = np.flatnonzero(wanted)
            batches += micro_batches([samples[i] for i in rows], advantages[rows], budget)
        return batches

    @torch.no_grad()
    def _proximal(self, minibatches: list[list[MicroBatch]]) -> list[list[Tensor]] | None:
        """Log-probs of the whole batch before its first update; None if there is only one update.

        With one update the proximal policy *is* the current one, and its log-probs come with the same pass.
        """
        if len(minibatches) == 1:
            return None
        return [[self._forward(batch)[0] for batch in batches] for batches in minibatches]

    def _update(
        self, batches: list[MicroBatch], proximal: list[Tensor] | None
    ) -> tuple[TokenSums, float, bool | None]:
        """One optimiser update. Returns the sums, the gradient's norm, and whether it was applied.

        None instead of a bool: every advantage was zero, so there was no gradient. The weights are then
        left alone; otherwise AdamW's momentum and decay would move them for no reason.
        """
        settings = self.settings
        total = sum(batch.targets.numel() for batch in batches)
        sums = TokenSums()
        self.optimizer.zero_grad(set_to_none=True)
        for i, batch in enumerate(batches):
            with torch.set_grad_enabled(bool(batch.advantages.any())):
                logprobs, entropy = self._forward(batch)
                loss, part = policy_loss(
                    logprobs,
                    logprobs.detach() if proximal is None else proximal[i],
                    batch.behaviour,
                    batch.advantages,
                    clip_low=settings.clip_low,
                    clip_high=settings.clip_high,
                    correction_cap=settings.correction_cap,
                )
            part.entropy = float(entropy.sum())
            sums.add(part)
            if loss.requires_grad:
                (loss / total).backward()
        gradients = [p for p in self.model.parameters() if p.grad is not None]
        if not gradients:
            return sums, 0.0, None if np.isfinite(sums.loss) else False
        norm = float(nn.utils.clip_grad_norm_(gradients, settings.max_grad_norm))
        if not (np.isfinite(norm) and np.isfinite(sums.loss)):
            self.optimizer.zero_grad(set_to_none=True)
            return sums, norm, False
        self.updates += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums, norm, True

    def _forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the sampled tokens, float32 (S,) each."""
        hidden = hidden_states(self.model, batch.input_ids)
        logits = self.model.get_output_embeddings()(hidden.flatten(0, 1)[batch.positions])
        return token_logprobs(logits, batch.targets, batch.temperature)


def split_groups(groups: np.ndarray, parts: int) -> list[np.ndarray]:
    """Indices of `parts` nearly equal minibatches of whole groups, in order of first appearance.

    Fewer than `parts` when there are fewer groups.
    """
    names, first = np.unique(groups, return_index=True)
    ordered = names[np.argsort(first, kind="stable")]
    chunks = np.array_split(ordered, min(parts, len(ordered)))
    return [np.flatnonzero(np.isin(groups, chunk)) for chunk in chunks]


@torch.no_grad()
def _check_logits_are_plain(model: PreTrainedModel) -> None:
    ids = torch.arange(4).remainder(model.config.get_text_config().vocab_size)[None]
    plain = model.get_output_embeddings()(hidden_states(model, ids))
    if not torch.allclose(model(input_ids=ids, use_cache=False).logits, plain, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"{type(model).__name__} transforms its logits after the output embeddings; that is not supported"
        )
