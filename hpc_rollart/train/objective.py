"""The loss, whole and in one place: from rewards to the number that is differentiated.

Read top to bottom. For a batch of groups of trajectories, each group the answers to one prompt (one
environment seed), with `N` sampled tokens in all::

    A_i     = r_i - mean(r of the group)                 (optionally / (std of the group + eps))
    rho_t   = pi_theta(t) / pi_prox(t)                   how far this batch's updates moved the policy
    w_t     = min(pi_prox(t) / pi_behaviour(t), cap)     how far off-policy the token was sampled
    L       = -1/N * sum_t  w_t * min(rho_t * A_i, clip(rho_t, 1 - low, 1 + high) * A_i)

Three policies appear because the run is asynchronous. `pi_behaviour` sampled the token, in an engine
whose weights may be older than the trainer's by up to `alpha` versions, and may even have changed in
the middle of the trajectory (ROLLART, arXiv 2512.22560, section on bounded staleness: weights are
installed while requests are in flight). `pi_prox` is the trainer's policy when this batch began.
`pi_theta` is being differentiated. PPO's clip holds `pi_theta` near `pi_prox`, which is always fresh,
instead of near a stale `pi_behaviour`; what is stale is corrected by `w_t`.

Sources
-------
GRPO, arXiv 2402.03300: group-relative advantages. DAPO, arXiv 2503.14476: the token-level mean and
separate clip bounds. PPO, arXiv 1707.06347: the clipped surrogate. Decoupled PPO: arXiv 2110.00641, and
for asynchronous language-model training AReaL, arXiv 2505.24298. Truncated importance sampling:
Ionides 2008 (JCGS 17:295); V-trace, arXiv 1802.01561, truncates its weights the same way.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to a group's standard deviation before dividing by it."""


def group_advantages(
    rewards: np.ndarray, groups: np.ndarray, *, normalise_std: bool
) -> tuple[np.ndarray, int]:
    """Advantage of each trajectory over its own group (GRPO, arXiv 2402.03300, section 4.1.2).

    The group's mean is the baseline, so no value network is needed. Dividing by the group's standard
    deviation gives easy and hard prompts the same weight; leaving it out (Dr. GRPO, arXiv 2503.20783)
    keeps the gradient unbiased.

    Parameters
    ----------
    rewards
        float (N,), one a trajectory.
    groups
        int (N,), equal for members of one group; members need not be adjacent.
    normalise_std
        Divide by `std + STD_EPSILON`; the standard deviation is the population's (divided by n).

    Returns
    -------
    advantages
        float32 (N,). All members of a group whose rewards are equal get exactly 0, never rounding noise.
    zero_groups
        How many groups that was: they teach nothing.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(groups)
    advantages = np.zeros(len(rewards), dtype=np.float64)
    zero_groups = 0
    for group in np.unique(groups):
        members = groups == group
        r = rewards[members]
        if r.min() == r.max():
            zero_groups += 1
            continue
        advantages[members] = r - r.mean()
        if normalise_std:
            advantages[members] /= r.std() + STD_EPSILON
    return advantages.astype(np.float32), zero_groups


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each token, and the entropy it was drawn from, as the engine sampled it.

    Parameters
    ----------
    logits
        float (S, vocabulary), at the positions that predict the sampled tokens.
    tokens
        int64 (S,), the tokens that were sampled there.
    temperature
        float32 (S,), above 0: the engine divides its logits by it before sampling, so the ratio of
        policies is only right if the trainer does too. It holds for `top_p: 1` and `top_k: 0`, which leave
        the distribution whole.

    Returns
    -------
    logprobs
        float32 (S,), differentiable.
    entropy
        float32 (S,), in nats; detached, a metric only.
    """
    scaled = logits.float() / temperature[:, None]
    normaliser = torch.logsumexp(scaled, dim=-1)
    logprobs = scaled.gather(1, tokens[:, None]).squeeze(1) - normaliser
    with torch.no_grad():
        probabilities = torch.exp(scaled - normaliser[:, None])
        entropy = normaliser - (probabilities * scaled).sum(-1)
    return logprobs, entropy


@dataclass
class TokenSums:
    """Sums over sampled tokens: added over micro-batches, then divided once, so that means are exact.

    Attributes
    ----------
    tokens
        Sampled tokens summed over.
    loss, entropy
        Sum of the token losses (before the division by N) and of the entropies, in nats.
    clipped
        Tokens whose clip was the binding branch, that is, without gradient.
    correction, capped
        Sum of `w_t`, and tokens at which the cap cut it.
    kl
        Sum of the k3 estimate of KL(behaviour || current).
    """

    tokens: int = 0
    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    correction: float = 0.0
    capped: float = 0.0
    kl: float = 0.0

    def add(self, other: "TokenSums") -> None:
        """Add `other`'s sums to these."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def policy_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    correction_cap: float,
) -> tuple[Tensor, TokenSums]:
    """Clipped surrogate with truncated importance correction, summed over sampled tokens.

    The caller divides by N, the sampled tokens of the *whole* (mini)batch, not of the micro-batch: each
    token then weighs the same whatever the length of its trajectory (DAPO, arXiv 2503.14476, section
    3.3) and however the batch was cut to fit in memory.

    Parameters
    ----------
    logprobs
        float32 (S,), log pi_theta of each sampled token; differentiable.
    proximal
        float32 (S,), the trainer's own log-probs before the first update of this batch. Not the actor's
        current ones, or rho would always be 1 and the clip would never act.
    behaviour
        float32 (S,), the engine's log-probs at sampling.
    advantages
        float32 (S,), each token's trajectory's.
    clip_low, clip_high
        rho is clipped to [1 - clip_low, 1 + clip_high].
    correction_cap
        Upper bound of w. Truncation trades a little bias for bounded variance.

    Returns
    -------
    loss
        Scalar: the *sum* over the tokens given.
    sums
        The same and the metrics, as plain numbers.
    """
    rho = torch.exp(logprobs - proximal)
    surrogate = rho * advantages
    clipped = rho.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    with torch.no_grad():
        # No gradient flows through w: it reweights samples, it is no part of the policy being improved.
        ratio = torch.exp(proximal - behaviour)
        correction = ratio.clamp(max=correction_cap)
    loss = -(correction * torch.minimum(surrogate, clipped)).sum()
    with torch.no_grad():
        # k3 (Schulman 2020, "Approximating KL divergence"): unbiased for samples of pi_behaviour, never < 0.
        log_ratio = logprobs - behaviour
        kl = torch.expm1(log_ratio) - log_ratio
        sums = TokenSums(
            tokens=logprobs.numel(),
            loss=float(loss),
            clipped=float((clipped < surrogate).sum()),
            correction=float(correction.sum()),
            capped=float((ratio > correction_cap).sum()),
            kl=float(kl.sum()),
        )
    return loss, sums
