"""The actor-critic: one TensorDict module from observations to action, log-prob and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer

from sf_torchrl.algorithms.distributions import ActionDistribution
from sf_torchrl.algorithms.stretches import Stretches
from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.envs.try_out import try_out
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.layers import InputNormalizer
from sf_torchrl.models.network import ActorCriticNetwork

STATE_KEY = "recurrent_state"


class ActorCritic(TensorDictModuleBase):
    """Policy and value in a single TensorDict module.

    One module on purpose: each TensorDict module in a chain costs 20 to 50 us a call. Reads the
    env's observation keys; writes ``logits`` (or ``action_params``: means and log deviations),
    ``action``, ``action_log_prob`` ``[N]`` and ``state_value`` ``[N, 1]``. Samples the action, or
    takes the mode where tensordict's interaction type says so.

    With a core (``config.core``) it also reads ``recurrent_state`` ``[N, state_size]`` and writes
    ``("next", "recurrent_state")``, zeros at an episode's start; a TorchRL env gets the key from
    ``make_tensordict_primer()``. The shared-memory collector keeps it, and hands over the state
    in which each rollout began, as ``("collector", "initial_state")``.

    Args:
        specs: what the env observes and accepts; :meth:`for_env` reads them from an env.
        config: layers; Sample Factory's sizes by default.
        torso: a network of your own in place of encoders, core and decoder: takes a list of float32
            observations ``[N, *shape]``, one for each of ``in_keys``, and returns ``[N,
            num_outputs]`` features; its attribute ``num_outputs`` says how many.

    Raises:
        ValueError: an encoder that does not fit its observation, or a torso without
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
        self.in_keys: list[NestedKey] = [unravel_key(feature.key) for feature in self._inputs]
        self.out_keys: list[NestedKey] = [
            self.params_key,
            "action",
            "action_log_prob",
            "state_value",
        ]
        size = self.network.state_size
        self.state = Feature((STATE_KEY,), "float32", (size,)) if size else None
        """What it carries from step to step; None without a core."""
        if self.state is not None:
            self.in_keys.append(STATE_KEY)
            self.out_keys.append(("next", STATE_KEY))
            # TorchRL asks every policy that has this method.
            self.make_tensordict_primer = self._primer

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

    @property
    def observation_keys(self) -> list[NestedKey]:
        """The in-keys that the env observes: all but the recurrent state."""
        return [unravel_key(feature.key) for feature in self._inputs]

    def _primer(self) -> TensorDictPrimer:
        assert self.state is not None
        return TensorDictPrimer({STATE_KEY: Unbounded(shape=self.state.shape)}, expand_specs=True)

    def evaluate(self, observations: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Distribution parameters ``[N, num_params]`` and value ``[N]``, with gradient.

        Args:
            observations: ``[N, *shape]`` for each of ``observation_keys``, in their order.
        """
        return self.network.evaluate(observations)

    def evaluate_rollouts(
        self,
        observations: Sequence[Tensor],
        stretches: Stretches,
        following: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`evaluate`, through the core: see ``ActorCriticNetwork.evaluate_rollouts``."""
        return self.network.evaluate_rollouts(observations, stretches, following, state)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the out-keys into ``tensordict``, batch size ``[N]`` or any other."""
        lead = tensordict.batch_size
        rows = [tensordict.get(feature.key).reshape(-1, *feature.shape) for feature in self._inputs]
        sample = interaction_type() in (InteractionType.RANDOM, None)
        state = None
        if self.state is not None:
            state = tensordict.get(STATE_KEY, None)
            if state is None:
                raise ValueError(
                    f"the policy is recurrent and reads {STATE_KEY!r}; add its "
                    "make_tensordict_primer() to the env"
                )
            state = state.reshape(-1, *self.state.shape)
        for key, value in zip(self.out_keys, self.network.act(rows, sample, state), strict=True):
            tensordict.set(key, value.view((*lead, *value.shape[1:])))
        return tensordict
