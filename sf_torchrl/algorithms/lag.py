"""Policy lag: how old the policy was that took a step, and whether that is too old."""

import torch
from torch import Tensor


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


def _lag(policy_version: Tensor, learner_version: int) -> Tensor:
    """``[B, T]`` int64: learner's version minus the step's."""
    if policy_version.dtype != torch.int64:
        raise ValueError(f"policy_version must be int64, got {policy_version.dtype}")
    return learner_version - policy_version
