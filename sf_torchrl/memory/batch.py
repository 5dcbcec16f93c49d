"""From finished slots to a batch: the one copy between the slab and the learner."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from sf_torchrl.memory.slab import (
    AT_START,
    CORE_STATE,
    DONE,
    ENDS,
    ENV,
    FINAL,
    OBSERVATION,
    POLICY,
    REWARD,
    Key,
    Slab,
)


@dataclass(frozen=True)
class Episode:
    """One finished episode."""

    episode_return: float
    """Sum of the env's own rewards, neither scaled nor clipped."""
    length: int
    """Env steps."""


INITIAL_STATE = ("collector", "initial_state")
"""``[B, T, state_size]`` the recurrent state in which each rollout began, the same at each step."""


@dataclass(frozen=True)
class _Source:
    """One leaf of the slab, or part of it, and where it goes in the batch."""

    key: Key
    rows: Tensor  # [slot, k, T, ...] view of the slab; [slot, k, ...] of a core state

    def empty(self, num_rollouts: int, pin_memory: bool) -> Tensor:
        """Room for it in a new batch."""
        shape = (num_rollouts, *self.rows.shape[2:])
        return torch.empty(shape, dtype=self.rows.dtype, pin_memory=pin_memory)


class BatchAssembler:
    """Copies finished slots into ``[B, T]`` batches with TorchRL's keys.

    Each batch is new, contiguous memory that belongs to the caller.

    Args:
        slab: where the slots are.
        num_rollouts: ``B``.
        compact: leave out what followed each step (``("next", observation)`` and the like).
        pin_memory: page-locked batches, which a GPU can fetch by itself.
    """

    def __init__(
        self, slab: Slab, num_rollouts: int, compact: bool = False, pin_memory: bool = False
    ) -> None:
        self._pin_memory = pin_memory
        layout = slab.layout
        self._num_rollouts = num_rollouts
        self._steps = steps = layout.rollout_length
        views = slab.tensordict()
        # Keys that begin with an underscore are private, as in TorchRL's collectors.
        features = [f for f in layout.observation if not f.key[-1].startswith("_")]
        observed = [(f.key, views.get((OBSERVATION, *f.key))) for f in features]
        self._sources = [_Source(key, rows[:, :, :steps]) for key, rows in observed]
        self._sources += [_Source(f.key, views.get((POLICY, *f.key))) for f in layout.policy]
        self._sources += [
            _Source(("policy_version",), views.get((ENV, "policy_version"))),
            _Source(("collector", "traj_ids"), views.get((ENV, "traj_ids"))),
        ]
        for group, given in ((REWARD, layout.reward), (DONE, layout.done)):
            self._sources += [_Source(("next", *f.key), views.get((group, *f.key))) for f in given]
        self._states = [
            _Source(INITIAL_STATE, views.get((CORE_STATE, *f.key))[:, :, AT_START])
            for f in layout.core_state
        ]
        self._next, self._final = [], []
        if not compact:
            self._next = [_Source(("next", *key), rows[:, :, 1:]) for key, rows in observed]
            self._final = [views.get((FINAL, *f.key)) for f in features]
        self._roots = [(f.key, f.shape) for f in layout.done]
        self._derive_done = {f.key[-1] for f in layout.done} == set(ENDS)
        if self._derive_done:
            self._roots.append((("done",), (1,)))
        self._ended = slab.numpy(ENV, "ended")
        self._episode_return = slab.numpy(ENV, "episode_return")
        self._episode_length = slab.numpy(ENV, "episode_length")
        self.start()

    def start(self) -> None:
        """Begin a new, empty batch."""
        self._filled = 0
        self._batch = self._room_for(self._sources)
        self._batch_next = self._room_for(self._next)
        self._batch_states = self._room_for(self._states)

    def _room_for(self, sources: list[_Source]) -> list[Tensor]:
        return [source.empty(self._num_rollouts, self._pin_memory) for source in sources]

    @property
    def missing(self) -> int:
        """Rollouts that the batch still lacks."""
        return self._num_rollouts - self._filled

    def add(self, slot: int, first: int, count: int) -> list[Episode]:
        """Copy rollouts ``first .. first + count`` of a slot into the batch.

        Hot path: 1 to 2 us a leaf beyond the copy itself.

        Returns:
            The episodes that ended in them, oldest first.
        """
        of_slot, of_batch = slice(first, first + count), slice(self._filled, self._filled + count)
        for source, target in zip(self._sources, self._batch, strict=True):
            target[of_batch].copy_(source.rows[slot, of_slot])
        for source, target in zip(self._next, self._batch_next, strict=True):
            target[of_batch].copy_(source.rows[slot, of_slot])
        for source, target in zip(self._states, self._batch_states, strict=True):
            target[of_batch].copy_(source.rows[slot, of_slot])
        # What followed an episode's last step is not the next row, which a reset has overwritten.
        steps, rows = self._ended[slot, of_slot].T.nonzero()
        if len(rows) == 0:
            self._filled += count
            return []
        for final, target in zip(self._final, self._batch_next, strict=True):
            target[rows + self._filled, steps] = final[slot, rows + first, steps]
        self._filled += count
        returns = self._episode_return[slot, rows + first, steps].tolist()
        lengths = self._episode_length[slot, rows + first, steps].tolist()
        return [Episode(r, n) for r, n in zip(returns, lengths, strict=True)]

    def finish(self) -> TensorDict:
        """The full batch, ``[B, T]``; :meth:`start` must be called before the next.

        Root ``done``, ``terminated`` and ``truncated`` are all False, as with TorchRL's
        auto-resetting collectors.
        """
        batch = TensorDict({}, batch_size=[self._num_rollouts, self._steps])
        for source, value in zip(
            self._sources + self._next, self._batch + self._batch_next, strict=True
        ):
            batch.set(source.key, value)
        for source, value in zip(self._states, self._batch_states, strict=True):
            batch.set(source.key, value.unsqueeze(1).expand(-1, self._steps, -1))  # takes no memory
        if self._derive_done:
            following = batch.get("next")
            following.set("done", following.get("terminated") | following.get("truncated"))
        for key, shape in self._roots:
            root = torch.zeros((self._num_rollouts, self._steps, *shape), dtype=torch.bool)
            batch.set(key, root)
        batch.names = [None, "time"]
        return batch
