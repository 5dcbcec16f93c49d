"""Generalized advantage estimation, and the normalization of advantages."""

from typing import NamedTuple

import torch
from torch import Tensor

from sf_torchrl.algorithms.vtrace import (
    backward_recursion,
    check_rollouts,
    following_value,
    recursion_goes_on,
)

MIN_STD = 1e-7  # Sample Factory's


class GAEReturns(NamedTuple):
    """Regression target and policy-gradient weight for every step of a rollout."""

    value_target: Tensor  # [B, T]  advantage + V(s_t); 0 where masked
    advantage: Tensor  # [B, T]  0 where masked


@torch.no_grad()
def gae(  # noqa: PLR0913
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    mask: Tensor | None = None,
) -> GAEReturns:
    """On-policy advantages for a batch of rollouts, by exponentially weighted averaging.

    Rollouts are cut as in :mod:`sf_torchrl.algorithms.vtrace`: at ``done``, at the rollout's
    end and around masked steps. A cut bootstraps from ``next_value``, except at
    ``terminated``. Masked steps are inert to the bit, as is ``next_value`` where
    :func:`~sf_torchrl.algorithms.vtrace.bootstrap_positions` does not ask for it. (Sample
    Factory carries the sum through a masked step undiscounted instead, and at a time limit
    bootstraps from the step's own value.)

    Args:
        value: ``[B, T]`` V(s_t), in undiscounted reward units. Float32 or float64, as are
            the next two; all the same.
        next_value: ``[B, T]`` V of the observation that followed step t, taken *before*
            any reset.
        reward: ``[B, T]`` reward of step t.
        done: ``[B, T]`` bool, the episode ended at step t for any reason.
        terminated: ``[B, T]`` bool, it ended in a terminal state.
        gamma: discount per environment step, in [0, 1].
        gae_lambda: weight of longer returns, in [0, 1]; 0 is the one-step temporal
            difference, 1 the discounted return minus V.
        mask: ``[B, T]`` bool, True = train on it. None = train on every step.

    Returns:
        :class:`GAEReturns`, ``[B, T]``, in the dtype of the input and without gradient.

    Raises:
        ValueError: if the tensors do not share one 2-D shape, the numbers one dtype (float32
            or float64), if a flag is not bool, or a discount is outside [0, 1].

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equation 16.
    """
    check_rollouts((value, next_value, reward), (done, terminated, mask), gamma, gae_lambda)
    goes_on = recursion_goes_on(done, terminated, mask)
    following = following_value(value, next_value, terminated, goes_on)

    delta = reward + gamma * following - value
    trace = torch.full_like(value, gamma * gae_lambda)
    advantage = backward_recursion(delta, trace, goes_on, mask).contiguous()
    value_target = value + advantage
    if mask is not None:
        value_target = torch.where(mask, value_target, 0.0)
    return GAEReturns(value_target, advantage)


@torch.no_grad()
def normalize_advantage(advantage: Tensor, mask: Tensor | None = None) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over the unmasked steps.

    The deviation is the unbiased one, at least 1e-7, both as in Sample Factory. Never NaN for
    want of steps: a single unmasked step becomes 0.

    Args:
        advantage: any shape. What masked steps hold changes no output by one bit.
        mask: bool of the same shape, True = train on it. None = every step.

    Returns:
        The shape and dtype of ``advantage``, exactly 0 at masked steps, without gradient.

    Raises:
        ValueError: if ``mask`` is not bool or has another shape.
    """
    if mask is None:
        mask = torch.ones_like(advantage, dtype=torch.bool)
    if mask.dtype != torch.bool or mask.shape != advantage.shape:
        raise ValueError(
            f"mask must be bool of shape {list(advantage.shape)}, "
            f"got {mask.dtype} of shape {list(mask.shape)}"
        )
    count = mask.sum()
    mean = torch.where(mask, advantage, 0.0).sum() / count.clamp(min=1)
    centered = torch.where(mask, advantage - mean, 0.0)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return centered / variance.sqrt().clamp(min=MIN_STD)
