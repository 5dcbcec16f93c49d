"""Policy lag: how old the policy was that took a step, and whether that is too old."""

from typing import NamedTuple

import torch
from torch import Tensor


class LagStats(NamedTuple):
    """What to log about the lag of a batch. Scalar tensors, so that no GPU has to wait."""

    mean: Tensor  # float64, in policy versions
    max: Tensor  # int64, in policy versions
    dropped_fraction: Tensor  # float64, share of the steps that are not fresh, in [0, 1]


def is_fresh(policy_version: Tensor, learner_version: int, max_policy_lag: int) -> Tensor:
    """``[B, T]`` bool: the step is young enough to train on.

    Lag counts policy versions, which are optimizer steps. The bound is inclusive, as in
    TorchRL's ``max_staleness``; Sample Factory's is exclusive. A negative lag, a step from
    a policy that the learner does not have yet, is not fresh.

    Args:
        policy_version: ``[B, T]`` int64, version of the policy that chose the action.
        learner_version: version of the policy being trained.
        max_policy_lag: the largest lag to train on.

    Raises:
        ValueError: if ``policy_version`` is not int64. Float32 counts only to 2**24.
    """
    lag = _lag(policy_version, learner_version)
    return (lag >= 0) & (lag <= max_policy_lag)


def lag_stats(
    policy_version: Tensor,
    learner_version: int,
    max_policy_lag: int,
    mask: Tensor | None = None,
) -> LagStats:
    """Mean and largest lag of a batch, and the share of it that is not trained on.

    Args:
        policy_version: ``[B, T]`` int64, version of the policy that chose the action.
        learner_version: version of the policy being trained.
        max_policy_lag: the largest lag to train on, inclusive.
        mask: ``[B, T]`` bool, the steps to count. None = every step.

    Returns:
        :class:`LagStats`; zeros if there is no step to count.

    Raises:
        ValueError: if ``policy_version`` is not int64, or ``mask`` is not bool of its shape.
    """
    lag = _lag(policy_version, learner_version)
    fresh = is_fresh(policy_version, learner_version, max_policy_lag)
    if mask is None:
        mask = torch.ones_like(fresh)
    if mask.dtype != torch.bool or mask.shape != lag.shape:
        raise ValueError(
            f"mask must be bool of shape {list(lag.shape)}, "
            f"got {mask.dtype} of shape {list(mask.shape)}"
        )
    if not lag.numel():
        return LagStats(lag.new_zeros(()).double(), lag.new_zeros(()), lag.new_zeros(()).double())
    count = mask.sum()
    divisor = count.clamp(min=1).double()
    lowest = torch.iinfo(torch.int64).min
    largest = torch.where(mask, lag, lowest).max()
    return LagStats(
        mean=torch.where(mask, lag, 0).sum() / divisor,
        max=torch.where(count > 0, largest, 0),
        dropped_fraction=(mask & ~fresh).sum() / divisor,
    )


def _lag(policy_version: Tensor, learner_version: int) -> Tensor:
    """``[B, T]`` int64: learner's version minus the step's."""
    if policy_version.dtype != torch.int64:
        raise ValueError(f"policy_version must be int64, got {policy_version.dtype}")
    return learner_version - policy_version
