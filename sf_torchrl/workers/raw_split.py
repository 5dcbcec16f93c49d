"""The raw path: single gymnasium envs, one after the other, straight into the slab. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sf_torchrl.envs.factory import gymnasium_env
from sf_torchrl.envs.spaces import number, pick
from sf_torchrl.workers.split import Array, EnvSplit, SplitParts


class RawSplit(EnvSplit):
    """Gymnasium envs stepped in series."""

    def __init__(self, parts: SplitParts) -> None:
        super().__init__(parts)
        self._to_env = parts.specs.action.adapter()
        self._single_key = not parts.specs.is_dict
        self._envs = [gymnasium_env(self._make_env(parts)) for _ in parts.seeds]
        self._step_functions: list[Callable[[Any], tuple[Any, Any, Any, Any, Any]]] = [
            env.step for env in self._envs
        ]
        self._actions, self._reward = self._views.actions[0], self._views.rewards[0][..., 0]
        terminated, truncated = self._views.dones
        self._terminated, self._truncated = terminated[..., 0], truncated[..., 0]
        self._rewards: list[Any] = [0.0] * len(parts.seeds)
        self._earned = np.zeros(len(parts.seeds))

    def _reset_envs(self, slot: int) -> None:
        for i, (env, seed) in enumerate(zip(self._envs, self._seeds, strict=True)):
            observation, _ = env.reset(seed=seed)
            self._write(self._views.observation, slot, i, 0, observation)

    def _write(self, leaves: list[Array], slot: int, i: int, t: int, observation: Any) -> None:
        """Copy an observation at once: the env may reuse its buffer in the next step."""
        if self._single_key:
            leaves[0][slot, i, t] = observation
            return
        for key, leaf in zip(self._views.keys, leaves, strict=True):
            leaf[slot, i, t] = pick(observation, key)

    def _step_envs(self, slot: int, t: int) -> tuple[Any, Iterable[int]]:
        """Hot path. Beyond the env: 0.1 us to write four floats, 0.15 us for the loop."""
        observations = self._views.observation
        actions = self._to_env(self._actions[slot, :, t])
        rewards = self._rewards
        ended: list[int] = []
        next_rows = observations[0][slot, :, t + 1] if self._single_key else None
        for i, (step, action) in enumerate(zip(self._step_functions, actions, strict=True)):
            observation, rewards[i], terminated, truncated, _ = step(action)
            if terminated or truncated:
                self._terminated[slot, i, t] = terminated
                self._truncated[slot, i, t] = truncated
                self._write(self._views.final, slot, i, t, observation)
                rewards[i] = number(rewards[i])  # the env may reuse its array in the reset
                observation, _ = self._envs[i].reset()
                ended.append(i)
            if next_rows is not None:
                next_rows[i] = observation
            else:
                self._write(observations, slot, i, t + 1, observation)
        try:
            self._earned[:] = rewards
        except (TypeError, ValueError, RuntimeError):  # what holds one number
            self._earned[:] = [number(reward) for reward in rewards]
        self._reward[slot, :, t] = self._earned
        return self._earned, ended

    def close(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()
