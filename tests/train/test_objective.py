"""The loss against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from hpc_rollart.train.objective import STD_EPSILON, group_advantages, policy_loss, token_logprobs


def test_advantages_are_rewards_less_the_group_mean() -> None:
    advantages, zero = group_advantages(
        np.array([1.0, 5.0, 0.0, 7.0]), np.array([4, 9, 4, 9]), normalise_std=False
    )
    assert advantages.tolist() == [0.5, -1.0, -0.5, 1.0]
    assert advantages.dtype == np.float32
    assert zero == 0


def test_normalised_advantages_divide_by_the_population_deviation() -> None:
    # Rewards 1, 0, 0, 0: mean 1/4, variance (9/16 + 3/16)/4 = 3/16.
    advantages, _ = group_advantages(np.array([1.0, 0, 0, 0]), np.zeros(4, int), normalise_std=True)
    deviation = math.sqrt(3 / 16) + STD_EPSILON
    assert advantages == pytest.approx([0.75 / deviation] + [-0.25 / deviation] * 3, rel=1e-6)


@pytest.mark.parametrize("normalise_std", [False, True])
def test_a_group_with_equal_rewards_gets_exactly_zero(normalise_std: bool) -> None:
    # The mean of three times 0.1 is not 0.1 in floating point.
    advantages, zero = group_advantages(
        np.array([0.1, 0.1, 0.1, 0.0, 1.0]), np.array([0, 0, 0, 1, 1]), normalise_std=normalise_std
    )
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[4] > 0
    assert zero == 1


def test_loss_and_gradient_equal_the_hand_computed_case() -> None:
    """Four tokens; clip to [0.8, 1.2]; correction capped at 2.

    With w = min(prox/behaviour, 2) and rho = theta/prox:

    token  behaviour  prox  theta  w           rho               A   w * min(rho A, clip(rho) A)
    0      0.5        0.5   0.5    1           1                 1   1 * min(1, 1)         =  1
    1      0.25       0.5   0.75   2           1.5 -> clip 1.2   1   2 * min(1.5, 1.2)     =  2.4
    2      0.1        0.4   0.2    4 -> cap 2  0.5 -> clip 0.8  -1   2 * min(-0.5, -0.8)   = -1.6
    3      0.8        0.4   0.6    0.5         1.5 -> clip 1.2  -1   0.5 * min(-1.5, -1.2) = -0.75

    The sum is 1.05, so the loss is -1.05. d loss / d log theta = -w rho A where the unclipped branch binds,
    else 0: -1, 0 (clipped), 0 (clipped), +0.5 * 1.5 = 0.75.
    """
    behaviour = torch.tensor([0.5, 0.25, 0.1, 0.8]).log()
    proximal = torch.tensor([0.5, 0.5, 0.4, 0.4]).log()
    current = torch.tensor([0.5, 0.75, 0.2, 0.6]).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    loss, sums = policy_loss(
        current, proximal, behaviour, advantages, clip_low=0.2, clip_high=0.2, correction_cap=2.0
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1.05)
    assert current.grad is not None
    assert current.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0, 0.75])
    assert sums.tokens == 4
    assert sums.loss == pytest.approx(-1.05)
    assert sums.clipped == 2
    assert sums.correction == pytest.approx(1 + 2 + 2 + 0.5)
    assert sums.capped == 1  # 4 was cut to 2; exactly 2 was not cut
    # k3 = r - 1 - log r, r = theta/behaviour = 1, 3, 2, 0.75
    k3 = sum(r - 1 - math.log(r) for r in (1, 3, 2, 0.75))
    assert sums.kl == pytest.approx(k3, rel=1e-5)


def test_a_wider_upper_clip_lets_a_good_token_grow() -> None:
    ratio = torch.tensor([1.25]).log()
    zero, one = torch.zeros(1), torch.ones(1)
    for high, expected in ((0.2, -1.2), (0.28, -1.25)):
        loss, _ = policy_loss(ratio, zero, zero, one, clip_low=0.2, clip_high=high, correction_cap=2.0)
        assert loss.item() == pytest.approx(expected)


def test_no_gradient_flows_through_the_correction() -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss, _ = policy_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([-1.5]),
        torch.ones(1),
        clip_low=0.2,
        clip_high=0.2,
        correction_cap=5.0,
    )
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-math.exp(0.5))


def test_logprobs_are_those_of_the_tempered_distribution() -> None:
    # Logits 0, log 2, log 5 at temperature 0.5 are 0, 2 log 2, 2 log 5: probabilities 1/30, 4/30, 25/30.
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]])
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), torch.tensor([0.5]))
    p = [1 / 30, 4 / 30, 25 / 30]
    assert logprobs.item() == pytest.approx(math.log(p[1]), rel=1e-5)
    assert entropy.item() == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-5)
