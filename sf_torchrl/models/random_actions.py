"""Uniform random actions, as tensors; free of tensordict unless the env is TorchRL's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sf_torchrl.envs.spaces import EnvSpecs


def check_random_actions(specs: EnvSpecs) -> None:
    """Whether random actions can be drawn.

    Raises:
        ValueError: a continuous action without bounds.
    """
    bounds = (*specs.action.low, *specs.action.high)
    if specs.torchrl_action_spec is None and not all(abs(b) < float("inf") for b in bounds):
        raise ValueError(
            f"env {specs.name!r}: random actions need a bounded action space; give a policy"
        )


def random_actions(specs: EnvSpecs, count: int) -> list[Tensor]:
    """``[count, ...]`` actions for each key of ``specs.actions``, in order.

    Uniform; where TorchRL's spec has no bounds, as its ``rand`` draws them.
    """
    if specs.torchrl_action_spec is not None:
        drawn: Any = specs.torchrl_action_spec.expand(count).rand()
        return [drawn.get(feature.key) for feature in specs.actions]
    action = specs.action
    if action.kind == "discrete":
        chosen = torch.randint(action.n, (count,))
        return [functional.one_hot(chosen, action.n) if action.one_hot else chosen]
    low = torch.tensor(action.low).view(action.shape)
    width = torch.tensor(action.high).view(action.shape) - low
    return [low + width * torch.rand(count, *action.shape)]
