"""Policies on plain tensors, as the inference worker runs them. Free of tensordict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from sf_torchrl.models.network import ActorCriticNetwork

EXPLORATION = ("random", "mode", "median", "mean", "deterministic")
"""How actions are chosen: the members of tensordict's ``InteractionType``."""


class RowPolicy(nn.Module, ABC):
    """From rows of observations to rows of everything that the policy writes."""

    exploration = "random"
    """One of ``EXPLORATION``; may change between calls."""

    @property
    @abstractmethod
    def weights(self) -> nn.Module:
        """The module whose parameters and buffers have the names they are published by."""

    @abstractmethod
    def forward(self, observations: list[Tensor], count: int) -> Sequence[Tensor]:
        """``[count, ...]`` for each in-key -> ``[count, ...]`` for each out-key, in order."""


class NetworkPolicy(RowPolicy):
    """An ``ActorCritic`` by its network alone.

    Args:
        network: of the actor-critic.
    """

    def __init__(self, network: ActorCriticNetwork) -> None:
        super().__init__()
        self.network = network  # the name it has in ActorCritic

    @property
    def weights(self) -> nn.Module:
        """This module."""
        return self

    def forward(self, observations: list[Tensor], count: int) -> Sequence[Tensor]:
        """See :class:`RowPolicy`."""
        state = observations.pop() if self.network.state_size else None
        return self.network.act(observations, self.exploration == "random", state)


class Given:
    """A function without arguments that returns a policy made already, for the inference worker."""

    def __init__(self, policy: RowPolicy) -> None:
        self._policy = policy

    def __call__(self) -> RowPolicy:
        """The policy."""
        return self._policy
