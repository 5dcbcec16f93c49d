"""The network of an actor-critic, on plain tensors; free of tensordict.

The inference worker uses it: not importing tensordict saves it 85 MB and a second of its start.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sf_torchrl.algorithms.distributions import (
    ActionDistribution,
    Categorical,
    DiagonalGaussian,
)
from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.spaces import ActionSpec, EnvSpecs
from sf_torchrl.models.encoders import MLP, Encoder, InputNormalizer, initialize


def distribution_of(action: ActionSpec) -> ActionDistribution:
    """The distribution over an action space.

    Raises:
        ValueError: an action of several parts, or of integers with no single number of choices.
    """
    if action.kind == "other":
        raise ValueError(
            "the env's action is neither one of n nor floating-point numbers; ActorCritic has no "
            "distribution for it: give a TensorDict policy of your own"
        )
    if action.kind == "discrete":
        return Categorical(action.n)
    return DiagonalGaussian(math.prod(action.shape))


class Torso(nn.Module):
    """Encoder and decoder."""

    def __init__(self, specs: EnvSpecs, config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(specs.network_inputs, config)
        self.decoder = MLP(self.encoder.num_outputs, config.decoder_mlp_layers, config.nonlinearity)
        self.num_outputs = self.decoder.num_outputs

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        """``[N, num_outputs]`` features."""
        return self.decoder(self.encoder(observations))  # type: ignore[no-any-return]


class ActorCriticNetwork(nn.Module):
    """Normalizer, torso and two heads; arguments are those of ``ActorCritic``."""

    def __init__(
        self, specs: EnvSpecs, config: NetworkConfig, torso: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.action_shape = specs.action.shape
        self.distribution = distribution_of(specs.action)
        self.normalizer = InputNormalizer(specs.network_inputs, config.normalize_input)
        if torso is not None and not hasattr(torso, "num_outputs"):
            raise ValueError(
                f"torso {type(torso).__name__} needs num_outputs, its number of features"
            )
        self.torso: nn.Module = Torso(specs, config) if torso is None else torso
        self.critic_torso = None if config.actor_critic_share_weights else copy.deepcopy(self.torso)
        num_features = cast(int, self.torso.num_outputs)
        num_outputs = self.distribution.num_params
        self.log_stddev = None
        if specs.action.kind == "box" and not config.adaptive_stddev:
            num_outputs //= 2
            self.log_stddev = nn.Parameter(
                torch.full((num_outputs,), math.log(config.initial_stddev))
            )
        self.actor_head = nn.Linear(num_features, num_outputs)
        self.critic_head = nn.Linear(num_features, 1)
        # A torso of the user's own keeps the weights it came with.
        ours: list[nn.Module] = [self.actor_head, self.critic_head]
        if torso is None:
            ours += [part for part in (self.torso, self.critic_torso) if part is not None]
        for part in ours:
            part.apply(partial(initialize, config=config))
        if specs.action.kind == "box" and config.adaptive_stddev:
            with torch.no_grad():
                self.actor_head.bias[num_outputs // 2 :] = math.log(config.initial_stddev)

    def evaluate(self, observations: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Distribution parameters and value of observations, with gradient.

        Args:
            observations: ``[N, *shape]`` for each of ``in_keys``, in their order.

        Returns:
            ``[N, num_params]`` and ``[N]``, float32.
        """
        inputs = self.normalizer(observations)
        features = self.torso(inputs)
        params = functional.linear(features, self.actor_head.weight, self.actor_head.bias)
        if self.log_stddev is not None:
            params = torch.cat([params, self.log_stddev.expand_as(params)], -1)
        if self.critic_torso is not None:
            features = self.critic_torso(inputs)
        value = functional.linear(features, self.critic_head.weight, self.critic_head.bias)
        return params.float(), value.squeeze(-1).float()

    def act(self, observations: Sequence[Tensor], sample: bool) -> tuple[Tensor, ...]:
        """Parameters, action, its log-prob ``[N]`` and value ``[N, 1]``: what the policy writes.

        Args:
            observations: ``[N, *shape]`` for each key.
            sample: draw the action; False takes the mode.
        """
        params, value = self.evaluate(observations)
        choose = self.distribution.sample if sample else self.distribution.mode
        action = choose(params)
        log_prob = self.distribution.log_prob(params, action)
        return params, action.view(-1, *self.action_shape), log_prob, value.unsqueeze(-1)
