"""A split: envs of one worker that are stepped together and fill slots together.

What is counted and written for every kind of env stands here; how envs are stepped stands in
``raw_split``, ``vector_split`` and ``torchrl_split``. Free of torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.envs.try_out import make_alike
from sf_torchrl.memory.slab import (
    AT_START,
    CORE_STATE,
    DONE,
    ENV,
    FINAL,
    NOW,
    OBSERVATION,
    POLICY,
    REWARD,
    TRACKED,
    Feature,
    Key,
    Slab,
)

Array = np.ndarray[Any, Any]


class SlabViews:
    """NumPy views of the leaves an env worker reads and writes."""

    def __init__(self, slab: Slab, specs: EnvSpecs, state: Sequence[Feature]) -> None:
        self.keys = [feature.key for feature in specs.observation]
        self.observation = [slab.numpy(OBSERVATION, *key) for key in self.keys]
        self.final = [slab.numpy(FINAL, *key) for key in self.keys]
        self.state = [_RowPair(slab, feature.key) for feature in state]
        self.state_keys = [f.key for f in (*state, *slab.layout.core_state)]
        self.core_state = [slab.numpy(CORE_STATE, *f.key) for f in slab.layout.core_state]
        self.carried = [slab.numpy(OBSERVATION, *f.key) for f in slab.layout.observation]
        self.actions = [slab.numpy(POLICY, *feature.key) for feature in specs.actions]
        self.rewards = [slab.numpy(REWARD, *feature.key) for feature in specs.reward]
        self.dones = [slab.numpy(DONE, *feature.key) for feature in specs.done]
        self.traj_ids = slab.numpy(ENV, "traj_ids")
        self.ended = slab.numpy(ENV, "ended")
        self.episode_return = slab.numpy(ENV, "episode_return")
        self.episode_length = slab.numpy(ENV, "episode_length")
        tracked = {feature.key for feature in specs.tracked}
        pairs = [
            _RowPair(slab, f.key, only=0) if f.key in tracked else _Scratch(slab) for f in TRACKED
        ]
        self.is_init, self.step_count, self.episode_reward = pairs


class _RowPair:
    """A leaf of what holds before and after steps, and its values at episode ends."""

    def __init__(self, slab: Slab, key: Key, only: int | None = None) -> None:
        part = ... if only is None else (..., only)
        self.key = key
        self.rows = slab.numpy(OBSERVATION, *key)[part]
        self.final = slab.numpy(FINAL, *key)[part]


class _Scratch(_RowPair):
    """Takes what nobody reads: the env has a key of that name itself."""

    def __init__(self, slab: Slab) -> None:
        layout = slab.layout
        lead = (layout.num_slots, layout.envs_per_slot, layout.rollout_length)
        self.key = ()
        self.final = np.empty(lead, np.float32)
        self.rows = np.empty((*lead[:2], lead[2] + 1), np.float32)


@dataclass(frozen=True, kw_only=True)
class SplitParts:
    """What a split is made of."""

    create_env_fn: EnvFactory
    specs: EnvSpecs
    views: SlabViews
    slots: tuple[int, ...]
    """Indices of the split's slots, free at first."""
    seeds: tuple[int, ...]
    """One an env, for its first reset."""
    first_traj_id: int
    """Of the first env's first episode; each env after it has the next one."""
    num_envs: int
    """Envs of all workers."""


class EnvSplit(ABC):
    """``k`` envs stepped together, writing one slot at a time.

    The split's slots are its own for life. It writes only the slot it holds, and only until it
    has filled it; a slot comes back through :meth:`release`.
    """

    def __init__(self, parts: SplitParts) -> None:
        views = parts.views
        self._views = views
        self._seeds = parts.seeds
        self._free = deque(parts.slots)
        self._rollout_length = views.traj_ids.shape[2]
        k = len(parts.seeds)
        self._traj_ids = np.arange(parts.first_traj_id, parts.first_traj_id + k, dtype=np.int64)
        self._num_envs = parts.num_envs
        self._returns = np.zeros(k)
        self._lengths = np.zeros(k, np.int64)
        self.slot = self._free.popleft()
        self.step_index = 0

    def _make_env(self, parts: SplitParts) -> Any:
        """One more env, which must be like the one tried out."""
        return make_alike(parts.create_env_fn, parts.specs, parts.views.state_keys)

    @abstractmethod
    def _reset_envs(self, slot: int) -> None:
        """First reset of every env; writes observations, and states the env begins with."""

    @abstractmethod
    def _step_envs(self, slot: int, t: int) -> tuple[Any, Iterable[int]]:
        """Step every env with the actions at step ``t`` of a slot.

        Writes what is observed after it and after any reset to ``t + 1``, what was observed before
        a reset to the final leaves, and the ``DONE`` and ``REWARD`` leaves.

        Returns:
            The reward of every env, and which of them have ended an episode.
        """

    @abstractmethod
    def close(self) -> None:
        """Close every env."""

    def reset(self) -> None:
        """First reset of every env; afterwards the split waits for its first actions."""
        views, slot = self._views, self.slot
        views.is_init.rows[slot, :, 0] = True
        for core_state in views.core_state:
            core_state[slot, :, AT_START] = 0
        self._reset_envs(slot)
        self._begin_rollout()

    def _begin_rollout(self) -> None:
        views, slot = self._views, self.slot
        self.step_index = 0
        views.ended[slot] = False  # steps then write only the True ones
        views.is_init.rows[slot, :, 1:] = False
        for done in views.dones:
            done[slot] = False

    def step(self) -> bool:
        """Step every env once with the actions in the slab; True when the rollout is full.

        Hot path. Beyond the envs: 10 us a split for what is written for all envs together.
        """
        views, slot, t = self._views, self.slot, self.step_index
        views.traj_ids[slot, :, t] = self._traj_ids
        rewards, ended = self._step_envs(slot, t)
        self._returns += rewards
        self._lengths += 1
        for i in ended:
            self._end_episode(i)
        views.step_count.rows[slot, :, t + 1] = self._lengths
        views.episode_reward.rows[slot, :, t + 1] = self._returns
        self.step_index = t + 1
        return bool(self.step_index == self._rollout_length)

    def _end_episode(self, i: int) -> None:
        """Write the sums of the episode that env ``i`` has just ended, and begin the next one."""
        views, slot, t = self._views, self.slot, self.step_index
        views.ended[slot, i, t] = True
        views.episode_return[slot, i, t] = self._returns[i]
        views.episode_length[slot, i, t] = self._lengths[i]
        views.episode_reward.final[slot, i, t] = self._returns[i]
        views.step_count.final[slot, i, t] = self._lengths[i]
        views.is_init.rows[slot, i, t + 1] = True
        self._returns[i] = 0.0
        self._lengths[i] = 0
        self._traj_ids[i] += self._num_envs
        for core_state in views.core_state:
            core_state[slot, i, NOW] = 0
        for state in views.state:
            state.final[slot, i, t] = state.rows[slot, i, t + 1]
            state.rows[slot, i, t + 1] = self._first_state(state.key, i)

    def _first_state(self, key: Key, i: int) -> Any:
        """The recurrent state in which an episode begins."""
        return 0

    def begin_next(self) -> bool:
        """Go on in the next free slot, from what the full one ends with.

        Returns:
            False where no slot is free: the split waits for :meth:`release`.
        """
        if not self._free:
            return False
        full, self.slot = self.slot, self._free.popleft()
        for leaf in self._views.carried:
            leaf[self.slot, :, 0] = leaf[full, :, self._rollout_length]
        for core_state in self._views.core_state:
            core_state[self.slot, :, AT_START] = core_state[full, :, NOW]
        self._begin_rollout()
        return True

    def release(self, slot: int) -> None:
        """Take back a slot whose rollouts have been copied."""
        self._free.append(slot)
