"""The network of an actor-critic, on plain tensors; free of tensordict.

The inference worker uses it: not importing tensordict saves it 85 MB and a second of its start.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sf_torchrl.algorithms.distributions import (
    ActionDistribution,
    Categorical,
    DiagonalGaussian,
)
from sf_torchrl.algorithms.stretches import Stretches
from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.spaces import ActionSpec, EnvSpecs
from sf_torchrl.models.layers import InputNormalizer, initialize
from sf_torchrl.models.pictures import is_picture, is_scaled
from sf_torchrl.models.torso import Torso


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


@lru_cache
def supports_bfloat16(device: str = "cpu") -> bool:
    """Whether processors of this kind compute in bfloat16 here, rather than imitating it."""
    if device == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device == "cpu" and any(
        getattr(torch.cpu, name, lambda: False)()
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )


class ActorCriticNetwork(nn.Module):
    """Normalizer, torso and two heads; arguments are those of ``ActorCritic``."""

    def __init__(
        self, specs: EnvSpecs, config: NetworkConfig, torso: nn.Module | None = None
    ) -> None:
        super().__init__()
        inputs = specs.network_inputs
        self.action_shape = specs.action.shape
        self.distribution = distribution_of(specs.action)
        scaled = [torso is None and is_scaled(feature) for feature in inputs]
        self.normalizer = InputNormalizer(inputs, config.normalize_input, scaled)
        if torso is not None and not hasattr(torso, "num_outputs"):
            raise ValueError(
                f"torso {type(torso).__name__} needs num_outputs, its number of features"
            )
        if torso is not None and config.core != "none":
            raise ValueError(f"core={config.core!r} has no place in a torso of your own")
        self.torso: nn.Module = Torso(inputs, config) if torso is None else torso
        self.critic_torso = None if config.actor_critic_share_weights else copy.deepcopy(self.torso)
        self._precision_wanted = config.precision
        if config.precision == "auto" and not any(is_picture(f) for f in inputs):
            self._precision_wanted = "float32"
        self._make_heads(specs, config)
        # A torso of the user's own keeps the weights it came with.
        ours: list[nn.Module] = [self.actor_head, self.critic_head]
        if torso is None:
            ours += [part for part in (self.torso, self.critic_torso) if part is not None]
        for part in ours:
            initialize(part, config)
            cast(Any, part).to(memory_format=torch.channels_last)  # of convolutions' weights
        if specs.action.kind == "box" and config.adaptive_stddev:
            with torch.no_grad():
                bias = self.actor_head.bias
                bias[len(bias) // 2 :] = math.log(config.initial_stddev)

    def _make_heads(self, specs: EnvSpecs, config: NetworkConfig) -> None:
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

    @property
    def state_size(self) -> int:
        """Numbers in the recurrent state of one lane, the critic's included; 0 without a core."""
        torsos = (self.torso, self.critic_torso)
        return sum(torso.state_size for torso in torsos if isinstance(torso, Torso))

    def uses_bfloat16(self, device: str) -> bool:
        """Whether encoder, core and decoder compute in bfloat16 on devices of this kind."""
        wanted = self._precision_wanted
        return wanted == "bfloat16" or (wanted == "auto" and supports_bfloat16(device))

    def evaluate(self, observations: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Distribution parameters and value of observations, with gradient, without a core.

        Args:
            observations: ``[N, *shape]`` for each of ``in_keys``, in their order.

        Returns:
            ``[N, num_params]`` and ``[N]``, float32.
        """
        inputs = self.normalizer(observations)
        with self._precision(observations):
            features = self.torso(inputs)
            critic = None if self.critic_torso is None else self.critic_torso(inputs)
        return self._heads(features, critic)

    def evaluate_rollouts(
        self,
        observations: Sequence[Tensor],
        stretches: Stretches,
        following: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As :meth:`evaluate`, of whole rollouts through the core.

        Args:
            observations: ``[N + M, *shape]`` for each key: N steps, then M observations that
                followed some of them.
            stretches: which steps follow each other.
            following: ``[M]`` the stretch whose end each of the last M followed.
            state: ``[B, state_size]`` in which each rollout begins.

        Returns:
            ``[N + M, num_params]`` and ``[N + M]``, float32.
        """
        inputs = self.normalizer(observations)
        states = self._states(state)
        with self._precision(observations):
            runs = [
                torso.run(inputs, stretches, following, part)
                for torso, part in zip(self._torsos(), states, strict=True)
            ]
        return self._heads(runs[0], runs[1] if len(runs) > 1 else None)

    def _torsos(self) -> list[Torso]:
        both = [self.torso] if self.critic_torso is None else [self.torso, self.critic_torso]
        return cast(list[Torso], both)

    def _states(self, state: Tensor) -> tuple[Tensor, ...]:
        return state.chunk(1 if self.critic_torso is None else 2, -1)

    def _precision(self, observations: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
        device = observations[0].device.type
        bfloat16 = self.uses_bfloat16(device)
        if bfloat16 or torch.is_autocast_enabled(device):  # somebody else's is not ours
            return torch.autocast(device, torch.bfloat16, enabled=bfloat16)
        return contextlib.nullcontext()

    def _heads(self, features: Tensor, critic: Tensor | None) -> tuple[Tensor, Tensor]:
        """In float32 whatever the precision: ratios are differences of what comes out."""
        if torch.is_autocast_enabled(features.device.type):  # around this network
            with torch.autocast(features.device.type, enabled=False):
                return self._heads(features, critic)
        features = features.float()
        params = functional.linear(features, self.actor_head.weight, self.actor_head.bias)
        if self.log_stddev is not None:
            params = torch.cat([params, self.log_stddev.expand_as(params)], -1)
        if critic is not None:
            features = critic.float()
        value = functional.linear(features, self.critic_head.weight, self.critic_head.bias)
        return params.float(), value.squeeze(-1).float()

    def act(
        self, observations: Sequence[Tensor], sample: bool, state: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """What the policy writes.

        Args:
            observations: ``[N, *shape]`` for each key.
            sample: draw the action; False takes the mode.
            state: ``[N, state_size]`` recurrent state, with a core.

        Returns:
            Parameters, action, its log-prob ``[N]``, value ``[N, 1]``, and with a core the state
            after the step.
        """
        after: tuple[Tensor, ...] = ()
        if state is None:
            params, value = self.evaluate(observations)
        else:
            params, value, *after_step = self._step(observations, state)
            after = tuple(after_step)
        choose = self.distribution.sample if sample else self.distribution.mode
        action = choose(params)
        log_prob = self.distribution.log_prob(params, action)
        shaped = action.view(-1, *self.action_shape)
        return (params, shaped, log_prob, value.unsqueeze(-1), *after)

    def _step(self, observations: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self.normalizer(observations)
        with self._precision(observations):
            steps = [
                torso.step(inputs, part)
                for torso, part in zip(self._torsos(), self._states(state), strict=True)
            ]
        critic = steps[1][0] if len(steps) > 1 else None
        return (*self._heads(steps[0][0], critic), torch.cat([after for _, after in steps], -1))
