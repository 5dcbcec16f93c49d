"""Policies as a collector takes them: whatever is given becomes a TensorDict module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.modules import RandomPolicy as AnyRandomPolicy

from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.random_actions import check_random_actions, random_actions

Policy = nn.Module | Callable[..., Any]
"""A TensorDict module, a module or function from the env's observations to actions, or a function
from TensorDict to TensorDict."""


def fake_observations(specs: EnvSpecs, count: int) -> TensorDict:
    """``[count]`` observations of zeros, at an episode's start."""
    found = TensorDict({}, batch_size=[count])
    for feature in (*specs.observation, *specs.tracked):
        found.set(feature.key, zeros(feature, count))
    if "is_init" in found.keys():  # noqa: SIM118 (a TensorDict's iterator is over its rows)
        found.get("is_init").fill_(True)
    return found


def zeros(feature: Feature, count: int) -> Tensor:
    """``[count, ...]`` zeros of a feature."""
    dtype = torch.from_numpy(np.zeros(0, feature.dtype)).dtype
    return torch.zeros(count, *feature.shape, dtype=dtype)


class RandomPolicy(nn.Module):
    """Uniform random actions.

    Args:
        specs: of the env; every bound of its action must be finite.

    Raises:
        ValueError: an unbounded action.
    """

    in_keys: tuple[str, ...] = ()

    def __init__(self, specs: EnvSpecs) -> None:
        super().__init__()
        check_random_actions(specs)
        self._specs = specs
        self.out_keys = [unravel_key(feature.key) for feature in specs.actions]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the action."""
        drawn = random_actions(self._specs, tensordict.numel())
        for key, action in zip(self.out_keys, drawn, strict=True):
            tensordict.set(key, action.view(*tensordict.batch_size, *action.shape[1:]))
        return tensordict


class TensorPolicy(TensorDictModule):
    """A module or function from observations to the action."""


class FunctionPolicy(nn.Module):
    """A function from TensorDict to TensorDict; what it adds are its out-keys.

    Args:
        function: the function, or a module without ``in_keys``.
        specs: of the env.
    """

    def __init__(
        self, function: Callable[[TensorDictBase], TensorDictBase], specs: EnvSpecs
    ) -> None:
        super().__init__()
        self.function = function
        fake = fake_observations(specs, 2)
        before = set(fake.keys(True, True))
        self.in_keys = [unravel_key(f.key) for f in (*specs.observation, *specs.tracked)]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            after = function(fake)
        if not isinstance(after, TensorDictBase):
            raise ValueError(
                f"policy {_label(function)} takes a TensorDict and must return it with an "
                f"'action'; it returned {type(after).__name__}"
            )
        self.out_keys = [key for key in after.keys(True, True) if key not in before]
        if not self.out_keys:
            observed = ", ".join(".".join(feature.key) for feature in specs.observation)
            raise ValueError(
                f"policy {_label(function)} adds nothing to a TensorDict of observations; name "
                f"its parameter after one ({observed}), or wrap it in "
                "tensordict.nn.TensorDictModule"
            )

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What the function says."""
        return self.function(tensordict)


def as_tensordict_policy(policy: Policy, specs: EnvSpecs) -> nn.Module:
    """The policy with ``in_keys`` and ``out_keys``, as TorchRL's collectors wrap it.

    A module or function whose parameters are named after observation keys is called with those;
    any other of one parameter with the whole TensorDict.

    Raises:
        ValueError: it can be called in neither way.
    """
    if isinstance(policy, AnyRandomPolicy):
        given = policy.action_spec
        if given is not None:
            whole = given if isinstance(given, Composite) else Composite({policy.action_key: given})
            specs = replace(specs, torchrl_action_spec=whole)
        return RandomPolicy(specs)
    if hasattr(policy, "in_keys") and hasattr(policy, "out_keys"):
        return cast(nn.Module, policy)
    if not callable(policy):
        raise ValueError(
            f"policy must be a TensorDict module or a function, got {type(policy).__name__}"
        )
    parameters = inspect.signature(getattr(policy, "forward", policy)).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    observed = [f.key[0] for f in specs.observation if len(f.key) == 1]
    if required and set(required) <= set(observed):
        out_keys = [unravel_key(specs.actions[0].key), *_further_outputs(policy, required, specs)]
        return TensorPolicy(policy, in_keys=required, out_keys=out_keys)
    if len(required) == 1:
        try:
            return FunctionPolicy(policy, specs)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"policy {_label(policy)} fails on a TensorDict of the observations of env "
                f"{specs.name!r}: {first_line(error)}. Name its parameter after an "
                f"observation ({', '.join(observed)}), or wrap it in tensordict.nn.TensorDictModule"
            ) from error
    raise ValueError(
        f"policy {_label(policy)} takes {required}; env {specs.name!r} observes {observed}. Name "
        "its parameters after observations, or wrap it in tensordict.nn.TensorDictModule"
    )


def _further_outputs(policy: Callable[..., Any], names: list[str], specs: EnvSpecs) -> list[str]:
    """Names of what a module gives beside the action, as TorchRL's collectors name them."""
    fake = fake_observations(specs, 2)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        answer = policy(*(fake.get(name) for name in names))
    count = len(answer) if isinstance(answer, tuple) else 1
    return [f"output{index}" for index in range(1, count)]


def first_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _label(policy: object) -> str:
    return getattr(policy, "__name__", type(policy).__name__)


def published_module(policy: nn.Module) -> nn.Module:
    """The module whose weights are published: the user's own where ours is wrapped around it."""
    inner: object = policy
    if isinstance(policy, FunctionPolicy):
        inner = policy.function
    elif isinstance(policy, TensorPolicy):
        inner = policy.module
    return inner if isinstance(inner, nn.Module) else policy
