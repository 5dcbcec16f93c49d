"""What a policy reads and writes, found out by running it once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, unravel_key
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn
from torchrl.envs import Compose
from torchrl.modules.utils import get_primers_from_module

from sf_torchrl.envs.spaces import RESERVED_KEYS, EnvSpecs
from sf_torchrl.memory.slab import Feature, Key
from sf_torchrl.models.actor_critic import ActorCritic
from sf_torchrl.models.given_policy import (
    Policy,
    as_tensordict_policy,
    fake_observations,
    first_line,
    published_module,
    zeros,
)
from sf_torchrl.models.row_policy import NetworkPolicy, RowPolicy


@dataclass(frozen=True)
class PolicyIO:
    """Keys and per-step features of a policy."""

    in_keys: tuple[Key, ...]
    outputs: tuple[Feature, ...]
    state: tuple[Feature, ...] = ()
    """Recurrent state, and what a policy keeps to itself from step to step."""
    state_outputs: tuple[Key, ...] = ()
    """Where each state is written: ``("next", key)``, or its own key if that is private."""
    core_state: tuple[Feature, ...] = ()
    """Recurrent state of our own network: stored where rollouts begin only."""


def _as_keys(keys: Iterable[Any]) -> list[Key]:
    unraveled = (unravel_key(key) for key in keys)
    return [(key,) if isinstance(key, str) else tuple(key) for key in unraveled]


@torch.no_grad()
def read_policy_io(policy: nn.Module, specs: EnvSpecs, *, may_copy: bool = True) -> PolicyIO:
    """Run a copy of the policy once on zeros and see what it writes.

    Args:
        policy: has in_keys and out_keys.
        specs: of the env.
        may_copy: False runs the policy itself.

    Raises:
        ValueError: it reads a key that the env does not give, raises, writes no action, one that
            does not fit the env, or a key that is taken.
    """
    in_keys, out_keys = _as_keys(cast(Any, policy.in_keys)), _as_keys(cast(Any, policy.out_keys))
    written_next = {key[1:] for key in out_keys if key[0] == "next"}
    private = [key for key in out_keys if key[0] != "next" and key[-1].startswith("_")]
    out_keys = [key for key in out_keys if key[0] != "next" and key not in private]
    state = _state_features(policy, [key for key in in_keys if key in written_next], specs)
    state_keys = {feature.key for feature in state}
    observed = [f.key for f in (*specs.observation, *specs.tracked) if f.key not in state_keys]
    in_keys += [key for key in _undeclared_keys(policy) if key in observed and key not in in_keys]
    _check_keys(in_keys, out_keys, observed, state_keys, written_next, specs)
    count = 2
    fake = fake_observations(specs, count)
    for feature in state:
        fake.set(feature.key, zeros(feature, count))
    probe = _copied(policy) if may_copy else policy
    was_training = probe.training
    try:
        with torch.random.fork_rng(devices=[]):
            answer = probe.eval()(fake)
    except Exception as error:
        raise ValueError(
            f"the policy fails on observations of env {specs.name!r}: {first_line(error)}"
        ) from error
    finally:
        probe.train(was_training)
    outputs = tuple(_feature(key, answer.get(key), count) for key in out_keys)
    _check_action(answer, specs)
    if type(policy) is ActorCritic:  # a subclass may read its state at any step
        return PolicyIO(in_keys=tuple(in_keys), outputs=outputs, core_state=state)
    # Private keys stay in a policy's TensorDict from step to step, as an exploration noise's do.
    kept = [key for key in private if answer.get(key, None) is not None]
    return PolicyIO(
        in_keys=(*in_keys, *(key for key in kept if key not in in_keys)),
        outputs=outputs,
        state=(*state, *(_feature(key, answer.get(key), count) for key in kept)),
        state_outputs=(*(("next", *feature.key) for feature in state), *kept),
    )


def _undeclared_keys(policy: nn.Module) -> list[Key]:
    """Where episodes begin, for TorchRL's modules that read it and do not say so (noise)."""
    named = (getattr(module, "is_init_key", None) for module in policy.modules())
    return list(dict.fromkeys(_as_keys(key for key in named if key is not None)))


def _copied(policy: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(policy).cpu()
    except Exception as error:
        raise ValueError(
            f"the policy cannot be copied for the inference worker: {type(error).__name__}: "
            f"{error}. Give a policy_factory that makes it there"
        ) from error


def _state_features(policy: nn.Module, keys: list[Key], specs: EnvSpecs) -> tuple[Feature, ...]:
    """Features of the recurrent state, from the env's primers or the policy's own."""
    if not keys:
        return ()
    known = {feature.key: feature for feature in specs.observation}
    found: Any = get_primers_from_module(policy, warn=False)
    for primer in found if isinstance(found, Compose) else [] if found is None else [found]:
        for key, spec in primer.primers.items(True, True):
            path: Key = (key,) if isinstance(key, str) else key
            dtype = str(spec.dtype).removeprefix("torch.")
            known.setdefault(path, Feature(path, dtype, tuple(spec.shape)))
    unknown = [key for key in keys if key not in known]
    if unknown:
        raise ValueError(
            f"policy carries the state {_names(unknown)} from step to step and says nowhere what "
            "shape it has; add a make_tensordict_primer() method to its module, or a "
            "TensorDictPrimer to the env"
        )
    return tuple(known[key] for key in keys)


def _check_keys(
    in_keys: list[Key],
    out_keys: list[Key],
    observed: list[Key],
    state_keys: set[Key],
    written_next: set[Key],
    specs: EnvSpecs,
) -> None:
    unknown = [key for key in in_keys if key not in observed and key not in state_keys]
    if unknown:
        raise ValueError(
            f"policy reads {_names(unknown)}; env {specs.name!r} observes "
            f"{_names(f.key for f in specs.observation)}"
        )
    unread = sorted(written_next - state_keys)
    if unread:
        raise ValueError(f"policy writes next {_names(unread)}, which it never reads")
    actions = [feature.key for feature in specs.actions]
    missing = [key for key in actions if key not in out_keys]
    if missing:
        raise ValueError(
            f"policy writes {_names(out_keys)}, but no "
            + " and no ".join(repr(name) for name in _names(missing))
        )
    taken = [
        key
        for key in out_keys
        if key not in actions and (key in observed or key[0] in RESERVED_KEYS)
    ]
    if taken:
        raise ValueError(f"policy writes {_names(taken)}, which a batch has already; rename them")


def _feature(key: Key, value: Tensor, count: int) -> Feature:
    if not isinstance(value, Tensor):
        raise ValueError(f"policy writes {'.'.join(key)!r}, which is no tensor: {value!r}")
    if value.shape[:1] != (count,):
        raise ValueError(
            f"policy writes {'.'.join(key)!r} of shape {tuple(value.shape)} for {count} envs"
        )
    if value.dtype is torch.bfloat16:
        raise ValueError(f"policy writes {'.'.join(key)!r} as bfloat16; cast it to float32")
    return Feature(key, str(value.dtype).removeprefix("torch."), tuple(value.shape[1:]))


def _names(keys: Iterable[Key]) -> list[str]:
    return [".".join(key) for key in keys]


def _check_action(answer: TensorDictBase, specs: EnvSpecs) -> None:
    is_raw = specs.torchrl_action_spec is None
    for feature in specs.actions:
        action = answer.get(feature.key)
        shape = tuple(action.shape[1:])
        is_index = is_raw and specs.action.kind == "discrete" and shape == ()
        wants_integer = np.dtype(feature.dtype).kind != "f"
        if (shape == feature.shape or is_index) and not (
            wants_integer and action.dtype.is_floating_point
        ):
            continue
        if specs.action.kind == "discrete" and not specs.action.one_hot:
            raise ValueError(
                f"env {specs.name!r} takes one integer action; the policy writes {action.dtype} of "
                f"shape {shape} an env. TorchRL: use categorical, not one-hot, actions"
            )
        raise ValueError(
            f"env {specs.name!r} takes {'.'.join(feature.key)} of shape {feature.shape} and dtype "
            f"{feature.dtype}; the policy writes {action.dtype} of shape {shape}"
        )


class TensorDictPolicy(RowPolicy):
    """Any TensorDict module as a policy on plain tensors; 20 us a call more than our own.

    Args:
        module: reads ``io.in_keys`` and writes ``io.outputs`` and the next ``io.state``.
        io: what of it is wanted.
    """

    def __init__(self, module: nn.Module, io: PolicyIO) -> None:
        super().__init__()
        self.module = module
        self._io = io
        self._out_keys = [*(feature.key for feature in io.outputs), *io.state_outputs]

    @property
    def weights(self) -> nn.Module:
        """The module, or the user's own in it."""
        return published_module(self.module)

    def forward(self, observations: list[Tensor], count: int) -> Sequence[Tensor]:
        """See :class:`~sf_torchrl.models.row_policy.RowPolicy`."""
        found = TensorDict({}, batch_size=[count])
        for key, observation in zip(self._io.in_keys, observations, strict=True):
            found.set(key, observation)
        with set_interaction_type(InteractionType[self.exploration.upper()]):
            answer = self.module(found)
        return [answer.get(key) for key in self._out_keys]


def as_row_policy(policy: nn.Module, io: PolicyIO) -> RowPolicy:
    """The policy as the inference worker runs it; shares its parameters."""
    if type(policy) is ActorCritic:  # a subclass may act otherwise
        return NetworkPolicy(policy.network.eval())
    return TensorDictPolicy(policy, io)


class MadeInWorker:
    """A function without arguments that makes the policy where it runs: ``policy_factory``.

    Args:
        factory: makes the policy; called in the inference worker.
        specs: of the env.
        io: what an earlier product of it read and wrote.
    """

    def __init__(self, factory: Callable[[], Policy], specs: EnvSpecs, io: PolicyIO) -> None:
        self._factory, self._specs, self._io = factory, specs, io

    def __call__(self) -> RowPolicy:
        """Make it."""
        return as_row_policy(as_tensordict_policy(self._factory(), self._specs), self._io)
