"""The vectorized path of gymnasium: several envs a call, whole arrays into the slab. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sf_torchrl.envs.factory import env_name
from sf_torchrl.envs.spaces import pick
from sf_torchrl.envs.vector import VectorEnvAdapter
from sf_torchrl.workers.split import Array, EnvSplit, SplitParts


class VectorSplit(EnvSplit):
    """One or more vectorized gymnasium envs, each with ``n`` envs of its own."""

    def __init__(self, parts: SplitParts) -> None:
        super().__init__(parts)
        n, k = parts.specs.envs_at_once, len(parts.seeds)
        self._to_env = parts.specs.action.array_adapter()
        self._single_key = not parts.specs.is_dict
        name = env_name(parts.create_env_fn)
        self._envs = [
            (slice(first, first + n), VectorEnvAdapter(self._make_env(parts), name))
            for first in range(0, k, n)
        ]
        self._actions, self._reward = self._views.actions[0], self._views.rewards[0][..., 0]
        terminated, truncated = self._views.dones
        self._terminated, self._truncated = terminated[..., 0], truncated[..., 0]
        self._rewards = np.zeros(k)

    def _reset_envs(self, slot: int) -> None:
        for rows, env in self._envs:
            observation = env.first_reset(list(self._seeds[rows]))
            self._write(self._views.observation, slot, rows, 0, observation)

    def _write(self, leaves: list[Array], slot: int, rows: slice, t: int, observation: Any) -> None:
        if self._single_key:
            leaves[0][slot, rows, t] = observation
            return
        for key, leaf in zip(self._views.keys, leaves, strict=True):
            leaf[slot, rows, t] = pick(observation, key)

    def _step_envs(self, slot: int, t: int) -> tuple[Any, Iterable[int]]:
        """Hot path. Beyond the env: 1 us a leaf and env object."""
        actions = np.array(self._to_env(self._actions[slot, :, t]))  # the env may write into it
        ended: list[int] = []
        for rows, env in self._envs:
            observation, reward, terminated, truncated, source = env.step(actions[rows])
            self._rewards[rows] = reward
            self._terminated[slot, rows, t] = terminated
            self._truncated[slot, rows, t] = truncated
            for i in (terminated | truncated).nonzero()[0].tolist():
                self._write_final(slot, rows.start + i, t, env, source, i)
                ended.append(rows.start + i)
            self._write(self._views.observation, slot, rows, t + 1, observation)
        self._reward[slot, :, t] = self._rewards
        return self._rewards, ended

    def _write_final(
        self, slot: int, row: int, t: int, env: VectorEnvAdapter, source: Any, i: int
    ) -> None:
        for key, leaf in zip(self._views.keys, self._views.final, strict=True):
            part = None if self._single_key else key
            leaf[slot, row, t] = env.final_observation(source, i, part)

    def close(self) -> None:
        """Close every env."""
        for _, env in self._envs:
            env.close()
