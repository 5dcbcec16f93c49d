"""The generic path: TorchRL envs, transforms included, leaf by leaf into the slab.

A TorchRL step costs 80 to 180 us; reading a leaf and writing a row of the slab costs 1 us
(``tensordict[i, t].update_`` 50 us a step). Imported only where an env is TorchRL's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key

from sf_torchrl.envs.torchrl_env import first_reset
from sf_torchrl.memory.slab import Feature, Key
from sf_torchrl.workers.split import Array, EnvSplit, SplitParts
from sf_torchrl.workers.torchrl_stepper import Stepper

_Leaves = list[tuple[NestedKey, Array]]


class TorchRLSplit(EnvSplit):
    """TorchRL envs, each of one env or of a batch of ``n``."""

    def __init__(self, parts: SplitParts) -> None:
        super().__init__(parts)
        specs, views = parts.specs, self._views
        self._k = k = len(parts.seeds)
        self._n = n = specs.envs_at_once
        self._is_batched = specs.path == "vectorized"
        self._envs = [Stepper(self._make_env(parts)) for _ in range(k // n)]
        self._current: list[TensorDictBase] = []
        self._observation = _with_keys(specs.observation, views.observation)
        self._final = _with_keys(specs.observation, views.final)
        self._rewards = _with_keys(specs.reward, views.rewards)
        self._dones = _with_keys(specs.done, views.dones)
        self._actions = list(zip(specs.actions, views.actions, strict=True))
        keys = [key for key, _ in self._dones]
        self._end_keys = ["done"] if "done" in keys else keys

    def _rows(self, index: int) -> slice | int:
        """Rows of the split that an env object fills: the slab's index has no batch if it has."""
        first = index * self._n
        return slice(first, first + self._n) if self._is_batched else first

    def _reset_envs(self, slot: int) -> None:
        for index, stepper in enumerate(self._envs):
            found = first_reset(stepper.env, self._seeds[index * self._n])
            self._current.append(found)
            where = (slot, self._rows(index), 0)
            for key, leaf in self._observation:
                leaf[where] = found.get(key).numpy()
            for state in self._views.state:  # a primer's, where the env has one
                value = found.get(state.key, None)
                state.rows[where] = 0 if value is None else value.numpy()

    def _step_envs(self, slot: int, t: int) -> tuple[Any, Iterable[int]]:
        """Hot path. Beyond the env: 1 us a leaf."""
        actions = [
            (unravel_key(f.key), self._unbound(f, leaf[slot, :, t])) for f, leaf in self._actions
        ]
        ended: list[int] = []
        for index, env in enumerate(self._envs):
            current, rows = self._current[index], self._rows(index)
            for key, action in actions:
                current.set(key, action[index])
            after, following = env.step(current)
            self._current[index] = following
            for key, leaf in self._observation:
                leaf[slot, rows, t + 1] = following.get(key).numpy()
            for key, leaf in self._rewards:
                leaf[slot, rows, t] = after.get(key).numpy()
            if after is following:
                continue  # not done, which the slot says already
            for key, leaf in self._dones:
                leaf[slot, rows, t] = after.get(key).numpy()
            if any(after.get(key).any() for key in self._end_keys):
                ended += self._end_envs(index, after, slot, t)
        earned = [leaf[slot, :, t].reshape(self._k, -1).sum(-1) for _, leaf in self._rewards]
        return sum(earned), ended

    def _unbound(self, feature: Feature, rows: Array) -> Sequence[torch.Tensor]:
        """Each env object's part of the actions, in memory of its own: envs may keep it."""
        whole = torch.from_numpy(rows.astype(feature.dtype)).view(self._k, *feature.shape)
        return torch.split(whole, self._n) if self._is_batched else whole.unbind()

    def _end_envs(self, index: int, after: TensorDictBase, slot: int, t: int) -> list[int]:
        """Keep what was observed before the reset; return the rows that have ended."""
        done = torch.stack(
            [after.get(key).reshape(self._n, -1).any(-1) for key in self._end_keys]
        ).any(0)
        local = done.nonzero()[:, 0].tolist()
        for i in local:
            for key, leaf in self._final:
                value = after.get(key)
                leaf[slot, index * self._n + i, t] = value[i] if self._is_batched else value
        return [index * self._n + i for i in local]

    def _first_state(self, key: Key, i: int) -> Any:
        value = self._current[i // self._n].get(key, None)
        if value is None:
            return 0
        return value[i % self._n] if self._is_batched else value

    def close(self) -> None:
        """Close every env."""
        for stepper in self._envs:
            if not stepper.env.is_closed:
                stepper.env.close()


def _with_keys(features: Sequence[Feature], leaves: Sequence[Array]) -> _Leaves:
    pairs = zip(features, leaves, strict=True)
    return [(unravel_key(feature.key), leaf) for feature, leaf in pairs]
