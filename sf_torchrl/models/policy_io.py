"""What a policy reads and writes, found out by running it once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn

from sf_torchrl.envs.spaces import RESERVED_KEYS, ActionSpec, EnvSpecs
from sf_torchrl.memory.slab import Feature, Key
from sf_torchrl.models.actor_critic import ActorCritic
from sf_torchrl.models.row_policy import NetworkPolicy, RowPolicy


@dataclass(frozen=True)
class PolicyIO:
    """Keys and per-step features of a policy."""

    in_keys: tuple[Key, ...]
    outputs: tuple[Feature, ...]


class RandomPolicy(nn.Module):
    """Uniform random actions.

    Args:
        action: the action space; every bound must be finite.

    Raises:
        ValueError: an unbounded action.
    """

    in_keys: tuple[str, ...] = ()
    out_keys = ("action",)

    def __init__(self, action: ActionSpec) -> None:
        super().__init__()
        self._action = action
        if action.kind == "discrete":
            return
        self._low = torch.tensor(action.low).view(action.shape)
        self._width = torch.tensor(action.high).view(action.shape) - self._low
        if not bool(torch.isfinite(self._width).all()):
            raise ValueError("random actions need a bounded action space; give a policy")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``action``."""
        count = tensordict.batch_size
        if self._action.kind == "discrete":
            action = torch.randint(self._action.n, count)
        else:
            action = self._low + self._width * torch.rand(*count, *self._action.shape)
        return tensordict.set("action", action)


def _as_keys(keys: Iterable[str | tuple[str, ...]]) -> list[Key]:
    unraveled = (unravel_key(key) for key in keys)
    return [(key,) if isinstance(key, str) else tuple(key) for key in unraveled]


def fake_observations(specs: EnvSpecs, count: int) -> TensorDict:
    """``[count]`` observations of zeros."""
    found = TensorDict({}, batch_size=[count])
    for feature in specs.observation:
        dtype = torch.from_numpy(np.zeros(0, feature.dtype)).dtype
        found.set(feature.key, torch.zeros(count, *feature.shape, dtype=dtype))
    return found


@torch.no_grad()
def read_policy_io(policy: nn.Module, specs: EnvSpecs) -> PolicyIO:
    """Run a copy of the policy once on zeros and see what it writes.

    Raises:
        ValueError: it is no TensorDict module, reads a key that the env does not give, raises,
            writes no ``action``, an action that does not fit the env, or a key that is taken.
    """
    if not (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
        raise ValueError(
            "policy must be a TensorDict module with in_keys and out_keys, got "
            f"{type(policy).__name__}; wrap it in tensordict.nn.TensorDictModule"
        )
    in_keys, out_keys = _as_keys(cast(Any, policy.in_keys)), _as_keys(cast(Any, policy.out_keys))
    given = [feature.key for feature in specs.observation]
    unknown = [key for key in in_keys if key not in given]
    if unknown:
        raise ValueError(
            f"policy reads {_names(unknown)}; env {specs.name!r} observes {_names(given)}"
        )
    taken = [key for key in out_keys if key in given or key[0] in RESERVED_KEYS - {"action"}]
    if taken:
        raise ValueError(f"policy writes {_names(taken)}, which a batch has already; rename them")
    if ("action",) not in out_keys:
        raise ValueError(f"policy writes {_names(out_keys)}, but no 'action'")
    count = 2
    # No keys read: the policy still needs to see how many actions are wanted.
    fake = fake_observations(specs, count)
    try:
        with torch.random.fork_rng(devices=[]):
            answer = copy.deepcopy(policy).cpu().eval()(fake)
    except Exception as error:
        raise ValueError(
            f"the policy fails on observations of env {specs.name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    outputs = []
    for key in out_keys:
        if key[-1].startswith("_"):  # private, as in TorchRL's collectors
            continue
        value: Tensor = answer.get(key)
        if value.shape[:1] != (count,):
            raise ValueError(
                f"policy writes {'.'.join(key)!r} of shape {tuple(value.shape)} for {count} envs"
            )
        if value.dtype is torch.bfloat16:
            raise ValueError(f"policy writes {'.'.join(key)!r} as bfloat16; cast it to float32")
        outputs.append(
            Feature(key, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))
        )
    _check_action(answer.get("action"), specs)
    return PolicyIO(tuple(in_keys), tuple(outputs))


def _names(keys: list[Key]) -> list[str]:
    return [".".join(key) for key in keys]


def _check_action(action: Tensor, specs: EnvSpecs) -> None:
    shape, kind = tuple(action.shape[1:]), specs.action.kind
    if kind == "discrete" and (shape != () or action.dtype.is_floating_point):
        raise ValueError(
            f"env {specs.name!r} takes one integer action; the policy writes {action.dtype} of "
            f"shape {shape} an env. TorchRL: use categorical, not one-hot, actions"
        )
    if kind == "box" and shape != specs.action.shape:
        raise ValueError(
            f"env {specs.name!r} takes actions of shape {specs.action.shape}; "
            f"the policy writes {shape}"
        )


class TensorDictPolicy(RowPolicy):
    """Any TensorDict module as a policy on plain tensors; 20 us a call more than our own.

    Args:
        module: reads ``io.in_keys`` and writes ``io.outputs``.
        io: what of it is wanted.
        exploration_type: whether it samples.
    """

    def __init__(self, module: nn.Module, io: PolicyIO, exploration_type: InteractionType) -> None:
        super().__init__()
        self.module = module
        self._io = io
        self._exploration_type = exploration_type

    @property
    def weights(self) -> nn.Module:
        """The module itself."""
        return self.module

    def forward(self, observations: list[Tensor], count: int) -> Sequence[Tensor]:
        """See :class:`~sf_torchrl.models.row_policy.RowPolicy`."""
        found = TensorDict({}, batch_size=[count])
        for key, observation in zip(self._io.in_keys, observations, strict=True):
            found.set(key, observation)
        with set_interaction_type(self._exploration_type):
            answer = self.module(found)
        return [answer.get(feature.key) for feature in self._io.outputs]


def as_row_policy(policy: nn.Module, io: PolicyIO, exploration_type: InteractionType) -> RowPolicy:
    """The policy as the inference worker runs it; shares its parameters."""
    if type(policy) is ActorCritic:  # a subclass may act otherwise
        return NetworkPolicy(policy.network, exploration_type is InteractionType.RANDOM)
    return TensorDictPolicy(policy, io, exploration_type)
