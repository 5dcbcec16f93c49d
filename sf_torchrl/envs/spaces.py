"""Gymnasium spaces as the slab and the policy see them. Free of torch: env workers use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from sf_torchrl.memory.slab import ENDS, TRACKED, Feature, Key

Array = np.ndarray[Any, Any]


RESERVED_KEYS = frozenset(
    (
        "action",
        "reward",
        "done",
        "terminated",
        "truncated",
        "next",
        "collector",
        "policy_version",
        "mask",
        "advantage",
        "value_target",
    )
)
"""Keys of a batch that an observation must not take."""


DEFAULT_REWARD = (Feature(("reward",), "float32", (1,)),)
"""What gymnasium's envs earn."""


class EnvError(ValueError):
    """An env cannot be made or does not keep gymnasium's contract."""


class UnsupportedSpaceError(ValueError):
    """The env has a space that cannot be laid out in shared memory or acted in."""


@dataclass(frozen=True, kw_only=True)
class ActionSpec:
    """An action space in plain values, so that it can be sent, saved and compared."""

    kind: str
    """``discrete``, ``box``, or ``other``: what only a TorchRL env has."""
    n: int = 0
    """Discrete: number of actions."""
    one_hot: bool = False
    """Discrete: TorchRL's encoding, ``n`` numbers of which one is set."""
    start: int = 0
    """Discrete: the env's smallest action; the policy counts from zero."""
    shape: tuple[int, ...] = ()
    """Box: shape of one action."""
    low: tuple[float, ...] = ()
    """Box: smallest values, flattened."""
    high: tuple[float, ...] = ()
    """Box: largest values, flattened."""
    dtype: str = "int64"
    """NumPy name of the space's dtype."""

    def adapter(self) -> Callable[[Array], list[Any]]:
        """The function from ``[k, ...]`` chosen actions to what each of k envs is given.

        Discrete actions become ints counted from ``start``; continuous ones are clipped to the
        space, in arrays of its dtype that the env may keep or change: the batch holds the
        unclipped action.
        """
        to_array = self.array_adapter()
        if self.kind == "discrete":
            return lambda actions: to_array(actions).tolist()
        return lambda actions: list(to_array(actions))

    def array_adapter(self) -> Callable[[Array], Array]:
        """As :meth:`adapter`, with one array ``[k, ...]`` for an env that steps k at once."""
        start = self.start
        if self.kind == "discrete":

            def to_env(actions: Array) -> Array:
                if actions.ndim == 2:  # one-hot
                    actions = actions.argmax(-1)
                return actions + start if start else actions

            return to_env
        low = np.array(self.low, self.dtype).reshape(self.shape)
        high = np.array(self.high, self.dtype).reshape(self.shape)
        return lambda actions: np.clip(actions.astype(self.dtype), low, high)


@dataclass(frozen=True, kw_only=True)
class EnvSpecs:
    """What one step of an env holds, read from a real one before anything starts."""

    name: str
    """Env id or class name, for messages."""
    path: str = "raw"
    """How it is stepped: ``raw`` (gymnasium), ``vectorized`` (several envs a call) or ``generic``
    (TorchRL)."""
    envs_at_once: int = 1
    """Envs that one object steps together."""
    observation: tuple[Feature, ...]
    """One feature a key; a space that is no ``Dict`` has the key ``observation``."""
    action: ActionSpec
    is_dict: bool = False
    """The observation space is a ``Dict``."""
    actions: tuple[Feature, ...] = (Feature(("action",), "int64", ()),)
    """What the env takes; the policy must write each of these keys."""
    reward: tuple[Feature, ...] = DEFAULT_REWARD
    """What a step earns."""
    done: tuple[Feature, ...] = tuple(Feature((key,), "bool", (1,)) for key in ENDS)
    """How a step ends an episode."""
    frame_skip: int = 1
    """Simulator frames in one env step, as ``metadata["frame_skip"]`` of a gymnasium env says."""
    torchrl_action_spec: Any = None
    """``full_action_spec`` of a TorchRL env."""

    @property
    def tracked(self) -> tuple[Feature, ...]:
        """What env workers count of each episode, where the env has no such key itself."""
        if [(f.key, f.shape) for f in self.reward] != [(("reward",), (1,))]:
            return ()
        given = {feature.key for feature in self.observation}
        return tuple(feature for feature in TRACKED if feature.key not in given)

    @property
    def network_inputs(self) -> tuple[Feature, ...]:
        """What a network looks at: the observation without what is counted of the episode."""
        counted = {feature.key for feature in TRACKED}
        return tuple(feature for feature in self.observation if feature.key not in counted)


def observation_features(space: spaces.Space[Any]) -> tuple[Feature, ...]:
    """Features of an observation space: ``Box``, or ``Dict`` of such, nested or not.

    Raises:
        UnsupportedSpaceError: any other space, or a key that a batch has already.
    """
    if isinstance(space, spaces.Dict):
        taken = sorted(RESERVED_KEYS.intersection(space.spaces))
        if taken:
            raise UnsupportedSpaceError(
                f"observation space has the keys {taken}, which a batch needs itself; rename them "
                "with a gymnasium wrapper"
            )
        return tuple(_dict_features(space, ()))
    return (_box_feature(space, ("observation",)),)


def _dict_features(space: spaces.Dict, prefix: Key) -> list[Feature]:
    found: list[Feature] = []
    for name, part in space.spaces.items():
        key = (*prefix, str(name))
        if isinstance(part, spaces.Dict):
            found += _dict_features(part, key)
        else:
            found.append(_box_feature(part, key))
    return found


def _box_feature(space: spaces.Space[Any], key: Key) -> Feature:
    if not isinstance(space, spaces.Box) or space.dtype.kind not in "fiub":
        raise UnsupportedSpaceError(
            f"observation space {'.'.join(key)!r} is {space}; supported: Box, or a Dict of Box. "
            "Convert it with a gymnasium wrapper, e.g. gymnasium.wrappers.FlattenObservation"
        )
    return Feature(key, space.dtype.name, tuple(space.shape))


def action_spec(space: spaces.Space[Any]) -> ActionSpec:
    """The action space in plain values.

    Raises:
        UnsupportedSpaceError: neither ``Discrete`` nor a floating-point ``Box``.
    """
    if isinstance(space, spaces.Discrete):
        return ActionSpec(kind="discrete", n=int(space.n), start=int(space.start))
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return ActionSpec(
            kind="box",
            shape=tuple(space.shape),
            low=tuple(space.low.ravel().tolist()),
            high=tuple(space.high.ravel().tolist()),
            dtype=space.dtype.name,
        )
    raise UnsupportedSpaceError(
        f"action space is {space}; supported: Discrete, or Box of floats. "
        "Convert it with a gymnasium wrapper, e.g. gymnasium.wrappers.TransformAction"
    )


def read_specs(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any], name: str
) -> EnvSpecs:
    """Specs of a gymnasium env, by the spaces of a single one.

    Raises:
        UnsupportedSpaceError: a space that is not supported.
    """
    action = action_spec(action_space)
    return EnvSpecs(
        name=name,
        observation=observation_features(observation_space),
        action=action,
        is_dict=isinstance(observation_space, spaces.Dict),
        actions=(Feature(("action",), action.dtype, action.shape),),
    )


def number(reward: Any) -> float:
    """A reward as a float: a number, or an array or tensor of any shape that holds one.

    Raises:
        TypeError, ValueError, RuntimeError: it is no number, or holds more than one.
    """
    holder = reward if hasattr(reward, "item") else np.asarray(reward)
    return float(holder.item())


def pick(observation: Any, key: Key) -> Any:
    """The part of a ``Dict`` observation that a key names."""
    for name in key:
        observation = observation[name]
    return observation
