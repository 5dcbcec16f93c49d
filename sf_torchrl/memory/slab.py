"""The slab: every step of every rollout in flight, in one arena.

A slot holds one rollout of each of the ``k`` envs of a split. Leaves are laid out
``[slot, k, T, ...]`` (observations ``[slot, k, T + 1, ...]``), so that ``slot`` and ``k`` together
are the rows of a batch. An env worker sees NumPy views, the torch side a ``TensorDict`` over the
same bytes; neither copies. Indexing a TensorDict costs 50 us a step, a NumPy row 0.1 us: hence two.

This module must stay free of torch at import: env workers use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sf_torchrl.memory.arena import Arena, aligned

if TYPE_CHECKING:
    from tensordict import TensorDict

Key = tuple[str, ...]

# Groups of leaves: the first part of every leaf's key, so that an env's key "reward" or "action"
# in a Dict observation can never collide with ours.
OBSERVATION = "observation"
FINAL = "final_observation"
ENV = "env"
POLICY = "policy"
REWARD = "reward"
DONE = "done"
CORE_STATE = "core_state"
WAITED = "waited_ns"
MODE = "exploration_mode"

AT_START, NOW = 0, 1
"""Rows of a core state: in which the rollout began, and in which the next step finds it."""

ENDS = ("terminated", "truncated")
"""The two ways in which an episode ends."""


@dataclass(frozen=True)
class Leaf:
    """One array of the slab."""

    key: Key
    dtype: str
    """NumPy name of the dtype."""
    shape: tuple[int, ...]
    """Whole shape, slots included."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Feature:
    """What one key holds for a single step of a single env: no slot, env or time dimension."""

    key: Key
    dtype: str
    shape: tuple[int, ...]


TRACKED = (
    Feature(("is_init",), "bool", (1,)),
    Feature(("step_count",), "int64", (1,)),
    Feature(("episode_reward",), "float32", (1,)),
)
"""What env workers count of each episode: the keys of TorchRL's InitTracker, StepCounter and
RewardSum, with their dtypes and shapes."""


@dataclass(frozen=True, kw_only=True)
class SlabLayout:
    """Where everything lies: equal in every process, sent once at start."""

    num_workers: int
    """Env workers, 1 where the main process steps the envs itself."""
    num_slots: int
    """Slots over all splits."""
    envs_per_slot: int
    """``k``, rollouts in one slot."""
    rollout_length: int
    """``T``, env steps in one rollout."""
    observation: tuple[Feature, ...]
    """What holds before a step and after it: what the env observes, what is counted of the episode
    (``TRACKED``) and the policy's recurrent state."""
    core_state: tuple[Feature, ...] = ()
    """Recurrent state that is kept for every env, but stored where a rollout begins only."""
    policy: tuple[Feature, ...]
    """What the policy writes: the action and everything else it has out-keys for."""
    reward: tuple[Feature, ...] = (Feature(("reward",), "float32", (1,)),)
    """What a step earns."""
    done: tuple[Feature, ...] = tuple(Feature((key,), "bool", (1,)) for key in ENDS)
    """How a step ends an episode."""

    def leaves(self) -> list[Leaf]:
        """All leaves in the order in which they lie in memory."""
        slots, k, steps = self.num_slots, self.envs_per_slot, self.rollout_length
        lead, lead_and_next = (slots, k, steps), (slots, k, steps + 1)
        found = [
            Leaf((OBSERVATION, *f.key), f.dtype, lead_and_next + f.shape) for f in self.observation
        ]
        # Touched at episode ends only; untouched pages cost no memory.
        found += [Leaf((FINAL, *f.key), f.dtype, lead + f.shape) for f in self.observation]
        found += [
            Leaf((CORE_STATE, *f.key), f.dtype, (slots, k, 2, *f.shape)) for f in self.core_state
        ]
        found += [Leaf((POLICY, *f.key), f.dtype, lead + f.shape) for f in self.policy]
        found += [Leaf((REWARD, *f.key), f.dtype, lead + f.shape) for f in self.reward]
        found += [Leaf((DONE, *f.key), f.dtype, lead + f.shape) for f in self.done]
        found += [
            Leaf((ENV, "policy_version"), "int64", lead),
            Leaf((ENV, "traj_ids"), "int64", lead),
            Leaf((ENV, "ended"), "bool", lead),
            # Written where an episode ends, garbage elsewhere.
            Leaf((ENV, "episode_return"), "float64", lead),
            Leaf((ENV, "episode_length"), "int64", lead),
            # Nanoseconds that each env worker, and last the inference worker, spent waiting.
            Leaf((WAITED,), "int64", (self.num_workers + 1,)),
            # How the policy chooses actions from now on: an index into EXPLORATION.
            Leaf((MODE,), "int64", (1,)),
        ]
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of address space; memory used is less where episodes end rarely."""
        return sum(aligned(leaf.nbytes) for leaf in self.leaves())


class Slab:
    """The layout carved out of an arena.

    Args:
        layout: what lies where.
        fd: descriptor of the arena of another process's slab; None makes a new one.
    """

    def __init__(self, layout: SlabLayout, fd: int | None = None) -> None:
        self.layout = layout
        self.arena = Arena(layout.nbytes, fd)
        self._offsets: dict[Key, tuple[int, Leaf]] = {}
        offset = 0
        for leaf in layout.leaves():
            self._offsets[leaf.key] = (offset, leaf)
            offset += aligned(leaf.nbytes)

    def numpy(self, *key: str) -> np.ndarray[Any, Any]:
        """View of one leaf."""
        offset, leaf = self._offsets[key]
        count = math.prod(leaf.shape)
        flat = np.frombuffer(self.arena.buffer, leaf.dtype, count, offset)
        return flat.reshape(leaf.shape)

    def tensordict(self) -> TensorDict:
        """All rollouts as a nested ``TensorDict`` of views, batch size ``[slot, k]``."""
        import torch
        from tensordict import TensorDict

        found = TensorDict({}, batch_size=[self.layout.num_slots, self.layout.envs_per_slot])
        for key in self._offsets:
            if key not in ((WAITED,), (MODE,)):
                found.set(key, torch.from_numpy(self.numpy(*key)))
        return found

    def close(self) -> None:
        """Close the descriptor; views stay valid."""
        self.arena.close()
