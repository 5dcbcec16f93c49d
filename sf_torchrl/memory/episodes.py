"""Whole episodes, one after the other in flat arrays: what a sampler returns.

Free of torch at import: episode workers use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Union

import numpy as np

if TYPE_CHECKING:
    from tensordict import TensorDict

Array = np.ndarray[Any, Any]
Tree = Union[Array, "dict[str, Tree]"]
"""An array, or a dict of such, nested or not: observations of a ``Dict`` space."""


class StepType(IntEnum):
    """Where in its episode a step stands; garage's values."""

    FIRST = 0
    """The episode's first step, unless it is also its last."""
    MID = 1
    TERMINAL = 2
    """The last step, in a terminal state: no value follows it."""
    TIMEOUT = 3
    """The last step, cut off by the env or by ``max_episode_length``."""


def map_tree(function: Callable[..., Any], first: Tree, *others: Tree) -> Any:
    """Apply a function to each array of a tree, or of several that have the same keys.

    Raises:
        ValueError: their keys differ.
    """
    if not isinstance(first, dict):
        return function(first, *others)
    for other in others:
        if not isinstance(other, dict) or other.keys() != first.keys():
            raise ValueError(f"observations have different keys: {_outline(first)} and {other!r}")
    return {
        name: map_tree(function, value, *(other[name] for other in others))
        for name, value in first.items()
    }


def _outline(tree: dict[str, Tree]) -> str:
    return f"a dict with {sorted(tree)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class EpisodeBatch:
    """``E`` whole episodes of ``N`` steps together, in flat arrays.

    Args:
        observations: ``[N, ...]``, the env's dtype; a dict of such where it observes a ``Dict``.
        last_observations: ``[E, ...]``, what followed each episode's last step.
        actions: ``[N, ...]``, as the agent chose them.
        rewards: ``[N]`` float64.
        env_infos: name to ``[N, ...]`` numbers or bools: what ``step`` told in every step.
        agent_infos: name to ``[N, ...]``: what the agent told beside its actions.
        step_types: ``[N]`` uint8, values of :class:`StepType`.
        lengths: ``[E]`` int64, steps of each episode; their sum is ``N``.

    Raises:
        ValueError: arrays whose first dimension is not what ``lengths`` says.
    """

    observations: Tree
    last_observations: Tree
    actions: Tree
    rewards: Array
    env_infos: dict[str, Array]
    agent_infos: dict[str, Array]
    step_types: Array
    lengths: Array

    def __post_init__(self) -> None:
        num_steps = int(self.lengths.sum())
        for field in fields(self):
            want = len(self.lengths) if field.name in _PER_EPISODE else num_steps
            map_tree(_length_check(field.name, want), getattr(self, field.name))

    @classmethod
    def concatenate(cls, *batches: EpisodeBatch) -> EpisodeBatch:
        """The episodes of all batches, in order; infos that are not in every batch are left out.

        Raises:
            ValueError: no batch, or arrays that do not fit together.
        """
        if not batches:
            raise ValueError("concatenate got no batch of episodes; give at least one")
        joined: dict[str, Any] = {}
        for field in fields(cls):
            parts = [getattr(batch, field.name) for batch in batches]
            if field.name in _INFOS:
                joined[field.name] = {
                    name: _join(f"{field.name}[{name!r}]", *(part[name] for part in parts))
                    for name in parts[0]
                    if all(name in part for part in parts)
                }
            else:
                joined[field.name] = _join(field.name, *parts)
        return cls(**joined)

    @property
    def num_episodes(self) -> int:
        """``E``."""
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """``N``."""
        return int(self.lengths.sum())

    def split(self) -> list[EpisodeBatch]:
        """One batch an episode, in order; their arrays are views of this one's."""
        ends = np.cumsum(self.lengths)
        return [
            self._part(slice(end - length, end), slice(episode, episode + 1))
            for episode, (end, length) in enumerate(zip(ends, self.lengths, strict=True))
        ]

    def _part(self, steps: slice, episodes: slice) -> EpisodeBatch:
        parts = {
            field.name: map_tree(
                lambda array, rows=episodes if field.name in _PER_EPISODE else steps: array[rows],
                getattr(self, field.name),
            )
            for field in fields(self)
        }
        return EpisodeBatch(**parts)

    def to_tensordict(self) -> TensorDict:
        """The steps in TorchRL's layout: a flat ``TensorDict`` ``[N]``, dimension named "time".

        Keys: ``observation`` (or the keys of a ``Dict``), ``action``, every agent info under its
        name, ``is_init``, ``done``, ``terminated``, ``truncated`` (False, as from TorchRL's
        collectors), ``("collector", "traj_ids")`` (int64 ``[N]``, the episode's place in this
        batch) and ``("next", ...)`` with the true next observation, ``reward`` (float32),
        ``done``, ``terminated`` and ``truncated``. Rewards and flags are ``[N, 1]``. Observations,
        actions and infos keep their dtype; the tensors own their memory.

        Raises:
            ValueError: an agent info or observation has a name that another key has.
        """
        return _to_tensordict(self)


_PER_EPISODE = ("last_observations", "lengths")
_INFOS = ("env_infos", "agent_infos")


def _length_check(name: str, want: int) -> Callable[[Array], None]:
    def check(array: Array) -> None:
        if array.ndim == 0 or len(array) != want:
            raise ValueError(
                f"{name} has shape {array.shape}; lengths says its first dimension must be {want}"
            )

    return check


def _join(name: str, *parts: Tree) -> Any:
    def join(*arrays: Array) -> Array:
        shapes = {array.shape[1:] for array in arrays}
        if len(shapes) > 1:
            raise ValueError(
                f"episodes do not fit into one batch: {name} has shapes {sorted(shapes)}; give all "
                "workers envs and agents of the same kind"
            )
        return np.concatenate(arrays)

    return map_tree(join, *parts)


def stack_steps(steps: Sequence[Tree]) -> Any:
    """``T`` observations or actions as ``[T, ...]`` arrays."""
    return map_tree(lambda *arrays: np.stack(arrays), *steps)


def info_column(values: Sequence[Any]) -> Array:
    """``T`` values of an info as ``[T, ...]``, of dtype object where they are no numbers alike."""
    try:
        column = np.array(values)
    except ValueError:  # arrays of several shapes
        column = np.array(None)
    if column.dtype.kind in NUMERIC and len(column) == len(values):
        return column
    objects = np.empty(len(values), object)
    objects[:] = [None] * len(values)
    return objects


NUMERIC = "biufc"
"""Kinds of NumPy dtypes that are numbers or bools."""


_FLAGS = ("done", "terminated", "truncated")


def _to_tensordict(episodes: EpisodeBatch) -> TensorDict:
    import torch
    from tensordict import TensorDict

    num_steps, lengths = episodes.num_steps, episodes.lengths
    last = np.cumsum(lengths) - 1
    first = last - lengths + 1
    found = TensorDict({}, batch_size=[num_steps])
    following = TensorDict({}, batch_size=[num_steps])

    _set_observation(found, map_tree(_tensor, episodes.observations))
    after = map_tree(
        lambda steps, final: _tensor(_shifted(steps, final, last)),
        episodes.observations,
        episodes.last_observations,
    )
    _set_observation(following, after)
    _set(found, "action", map_tree(_tensor, episodes.actions))
    for name, info in episodes.agent_infos.items():
        _set(found, name, _tensor(info))

    is_init = np.zeros((num_steps, 1), bool)
    is_init[first] = True
    terminated = (episodes.step_types == StepType.TERMINAL)[:, None]
    truncated = (episodes.step_types == StepType.TIMEOUT)[:, None]
    _set(found, "is_init", _tensor(is_init))
    for name in _FLAGS:
        _set(found, name, torch.zeros((num_steps, 1), dtype=torch.bool))
    _set(following, "reward", _tensor(episodes.rewards.astype(np.float32)[:, None]))
    for name, flag in zip(_FLAGS, (terminated | truncated, terminated, truncated), strict=True):
        _set(following, name, _tensor(flag))
    _set(found, "next", following)
    traj_ids = np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)
    _set(found, "collector", {"traj_ids": _tensor(traj_ids)})
    found.names = ["time"]
    return found


def _tensor(array: Array) -> Any:
    import torch

    return torch.from_numpy(array.copy())


def _shifted(steps: Array, final: Array, last: Array) -> Array:
    """What followed each step: the next row, but after an episode's last its final observation."""
    after = np.empty_like(steps)
    after[:-1] = steps[1:]
    after[last] = final
    return after


def _set_observation(target: TensorDict, observation: Tree | Any) -> None:
    if not isinstance(observation, dict):
        observation = {"observation": observation}
    for name, value in observation.items():
        _set(target, name, value)


def _set(target: TensorDict, name: str, value: Any) -> None:
    if name in target.keys():  # noqa: SIM118 (a TensorDict is no dict)
        raise ValueError(
            f"two parts of the episodes are named {name!r}; rename the agent info or observation"
        )
    target.set(name, value)
