"""The actor-critic: one TensorDict module from observations to action, log-prob and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDictBase, unravel_key
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn

from sf_torchrl.algorithms.distributions import ActionDistribution
from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.envs.try_out import try_out
from sf_torchrl.models.encoders import InputNormalizer
from sf_torchrl.models.network import ActorCriticNetwork


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
        self.specs = specs
        self.config = NetworkConfig() if config is None else config
        self.network = ActorCriticNetwork(specs, self.config, torso)
        self.params_key = "logits" if specs.action.kind == "discrete" else "action_params"
        self._inputs = specs.network_inputs
        self.in_keys = [unravel_key(feature.key) for feature in self._inputs]
        self.out_keys = [self.params_key, "action", "action_log_prob", "state_value"]

    @classmethod
    def for_env(cls, create_env_fn: EnvFactory, **layers: Any) -> ActorCritic:
        """An actor-critic that fits an env, which is made once and closed again.

        Args:
            create_env_fn: a gymnasium env id, or a callable that makes one env.
            **layers: fields of :class:`~sf_torchrl.config.NetworkConfig`.
        """
        return cls(try_out(create_env_fn), NetworkConfig(**layers))

    @property
    def distribution(self) -> ActionDistribution:
        """The distribution over actions that ``logits`` or ``action_params`` parametrize."""
        return self.network.distribution

    @property
    def normalizer(self) -> InputNormalizer:
        """The running statistics of observations."""
        return self.network.normalizer

    def evaluate(self, observations: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Distribution parameters ``[N, num_params]`` and value ``[N]``, with gradient.

        Args:
            observations: ``[N, *shape]`` for each of ``in_keys``, in their order.
        """
        return self.network.evaluate(observations)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the out-keys into ``tensordict``, batch size ``[N]`` or any other."""
        lead = tensordict.batch_size
        rows = [tensordict.get(feature.key).reshape(-1, *feature.shape) for feature in self._inputs]
        sample = interaction_type() in (InteractionType.RANDOM, None)
        for key, value in zip(self.out_keys, self.network.act(rows, sample), strict=True):
            tensordict.set(key, value.view((*lead, *value.shape[1:])))
        return tensordict
