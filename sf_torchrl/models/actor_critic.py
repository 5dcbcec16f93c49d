"""The actor-critic: one TensorDict module from observations to action, log-prob and value."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDictBase, unravel_key
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.nn import functional

from sf_torchrl.algorithms.distributions import (
    ActionDistribution,
    Categorical,
    DiagonalGaussian,
)
from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.factory import EnvFactory, try_out
from sf_torchrl.envs.spaces import ActionSpec, EnvSpecs
from sf_torchrl.models.encoders import MLP, Encoder, InputNormalizer, initialize


def distribution_of(action: ActionSpec) -> ActionDistribution:
    """The distribution over an action space."""
    if action.kind == "discrete":
        return Categorical(action.n)
    return DiagonalGaussian(math.prod(action.shape))


class Torso(nn.Module):
    """Encoder and decoder."""

    def __init__(self, specs: EnvSpecs, config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(specs.observation, config)
        self.decoder = MLP(self.encoder.num_outputs, config.decoder_mlp_layers, config.nonlinearity)
        self.num_outputs = self.decoder.num_outputs

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        """``[N, num_outputs]`` features."""
        return self.decoder(self.encoder(observations))  # type: ignore[no-any-return]


class ActorCritic(TensorDictModuleBase):
    """Policy and value in a single TensorDict module.

    One module on purpose: each TensorDict module in a chain costs 20 to 50 us a call. Reads the
    env's observation keys; writes ``logits`` (or ``action_params``: means and log deviations),
    ``action``, ``action_log_prob`` ``[N]`` and ``state_value`` ``[N, 1]``. Samples the action, or
    takes the mode where tensordict's interaction type says so.

    Args:
        specs: what the env observes and accepts; :meth:`for_env` reads them from an env.
        config: layers; Sample Factory's sizes by default.
        torso: a network of your own in place of encoders and decoder: takes a list of float32
            observations ``[N, *shape]``, one for each of ``in_keys``, and returns ``[N,
            num_outputs]`` features; its attribute ``num_outputs`` says how many.

    Raises:
        ValueError: an observation that the network has no encoder for, or a torso without
            ``num_outputs``.
    """

    def __init__(
        self,
        specs: EnvSpecs,
        config: NetworkConfig | None = None,
        torso: nn.Module | None = None,
    ) -> None:
        super().__init__()
        config = NetworkConfig() if config is None else config
        self.specs = specs
        self.config = config
        self.distribution = distribution_of(specs.action)
        self.params_key = "logits" if specs.action.kind == "discrete" else "action_params"
        self.in_keys = [unravel_key(feature.key) for feature in specs.observation]
        self.out_keys = [self.params_key, "action", "action_log_prob", "state_value"]
        self.normalizer = InputNormalizer(specs.observation, config.normalize_input)
        if torso is not None and not hasattr(torso, "num_outputs"):
            raise ValueError(
                f"torso {type(torso).__name__} needs num_outputs, its number of features"
            )
        self.torso: nn.Module = Torso(specs, config) if torso is None else torso
        self.critic_torso = None if config.actor_critic_share_weights else copy.deepcopy(self.torso)
        self.log_stddev = None
        num_features = cast(int, self.torso.num_outputs)
        num_outputs = self.distribution.num_params
        if specs.action.kind == "box" and not config.adaptive_stddev:
            num_outputs //= 2
            self.log_stddev = nn.Parameter(
                torch.full((num_outputs,), math.log(config.initial_stddev))
            )
        self.actor_head = nn.Linear(num_features, num_outputs)
        self.critic_head = nn.Linear(num_features, 1)
        self.apply(partial(initialize, config=config))
        if specs.action.kind == "box" and config.adaptive_stddev:
            with torch.no_grad():
                self.actor_head.bias[num_outputs // 2 :] = math.log(config.initial_stddev)

    @classmethod
    def for_env(cls, create_env_fn: EnvFactory, **layers: Any) -> ActorCritic:
        """An actor-critic that fits an env, which is made once and closed again.

        Args:
            create_env_fn: a gymnasium env id, or a callable that makes one env.
            **layers: fields of :class:`~sf_torchrl.config.NetworkConfig`.
        """
        return cls(try_out(create_env_fn), NetworkConfig(**layers))

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

    def act(self, observations: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What :meth:`forward` writes, on plain tensors: the inference worker's shorter way.

        Args:
            observations: ``[N, *shape]`` for each of ``in_keys``, in their order.

        Returns:
            A ``[N, ...]`` tensor for each of ``out_keys``, in their order.
        """
        params, value = self.evaluate(observations)
        takes_mode = interaction_type() not in (InteractionType.RANDOM, None)
        choose = self.distribution.mode if takes_mode else self.distribution.sample
        action = choose(params)
        log_prob = self.distribution.log_prob(params, action)
        return params, action.view(-1, *self.specs.action.shape), log_prob, value.unsqueeze(-1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the out-keys into ``tensordict``, batch size ``[N]`` or any other."""
        lead = tensordict.batch_size
        rows = [
            tensordict.get(feature.key).reshape(-1, *feature.shape)
            for feature in self.specs.observation
        ]
        for key, value in zip(self.out_keys, self.act(rows), strict=True):
            tensordict.set(key, value.view(*lead, *value.shape[1:]))
        return tensordict
