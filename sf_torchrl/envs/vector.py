"""Vectorized gymnasium envs, made alike: several envs a call, reset where they ended.

Free of torch: env workers use it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper

from sf_torchrl.envs.spaces import EnvError, pick
from sf_torchrl.memory.slab import Key

Array = np.ndarray[Any, Any]


def is_envpool(env: object) -> bool:
    """Whether EnvPool made it; does not import envpool."""
    return any(base.__module__.startswith("envpool.") for base in type(env).__mro__)


def check_autoreset(env: Any, name: str) -> AutoresetMode:
    """The autoreset mode of a gymnasium vector env.

    Raises:
        EnvError: ``NEXT_STEP``, or none is told.
    """
    mode: AutoresetMode = env.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        raise EnvError(
            f"vector env {name!r} has autoreset mode {getattr(mode, 'name', mode)}, whose steps "
            "after an episode's end are no transitions; make it with autoreset_mode="
            "gymnasium.vector.AutoresetMode.SAME_STEP or DISABLED"
        )
    return mode


class VectorEnvAdapter:
    """Steps a ``VectorEnv`` so that the observation before a reset is never lost.

    Args:
        env: autoreset mode ``SAME_STEP`` or ``DISABLED``, or an EnvPool with ``batch_size`` equal
            to ``num_envs``, whose ended envs are then reset at once.
        name: for messages.

    Raises:
        EnvError: ``NEXT_STEP`` autoreset, which spends a step of each ended env on its reset: that
            step is no transition, and a batch of fixed length cannot leave it out.
    """

    def __init__(self, env: Any, name: str) -> None:
        self.num_envs = int(env.num_envs)
        self._envpool = is_envpool(env)
        if self._envpool:
            _check_envpool(env, name)
            self._same_step = False
        else:
            self._same_step = check_autoreset(env, name) == AutoresetMode.SAME_STEP
        self._env = env  # a VectorEnv

    def first_reset(self, seeds: list[int]) -> Any:
        """Reset every env with a seed of its own; observations ``[num_envs, ...]``."""
        inner: Any = self._env
        while isinstance(inner, VectorWrapper):
            inner = inner.env
        if self._envpool:
            self._env = _reseeded(self._env, seeds[0])
            return self._env.reset()[0]
        if isinstance(inner, SyncVectorEnv | AsyncVectorEnv):
            return self._env.reset(seed=seeds)[0]
        return self._env.reset(seed=seeds[0])[0]

    def step(self, actions: Array) -> tuple[Any, Array, Array, Array, Any]:
        """Step every env.

        Returns:
            Observations after any reset, rewards, terminated, truncated, and what
            :meth:`final_observation` reads.
        """
        observation, reward, terminated, truncated, infos = self._env.step(actions)
        if self._same_step or not (terminated.any() or truncated.any()):
            return observation, reward, terminated, truncated, infos
        before = observation
        ended = np.asarray(terminated | truncated, dtype=bool)
        if self._envpool:
            rows = ended.nonzero()[0].astype(np.int32)
            fresh = self._env.reset(rows)[0]
            observation = _with_rows(observation, rows, fresh)
        else:
            before = _copied(observation)  # the env may write into its buffer
            observation = self._env.reset(options={"reset_mask": ended})[0]
        return observation, reward, terminated, truncated, before

    def final_observation(self, source: Any, i: int, key: Key | None) -> Any:
        """What env ``i``, which has just ended, observed before its reset.

        Args:
            source: the last of what :meth:`step` returned.
            i: index of the env.
            key: part of a ``Dict`` observation; None for the whole of any other.
        """
        if not self._same_step:
            return source[i] if key is None else pick(source, key)[i]
        final = source["final_obs"]
        if key is None:
            return final[i]
        return pick(final, key)[i] if isinstance(final, dict) else pick(final[i], key)

    def close(self) -> None:
        """Close the env."""
        self._env.close()


def _check_envpool(env: Any, name: str) -> None:
    if env.config["batch_size"] != env.num_envs:
        raise EnvError(
            f"EnvPool {name!r} has batch_size {env.config['batch_size']} and num_envs "
            f"{env.num_envs}; make it with both equal: every env is stepped in each call"
        )


def _reseeded(env: Any, seed: int) -> Any:
    """EnvPool takes its seed when it is made only: made again, so that workers differ."""
    config = env.spec.config._replace(seed=seed)
    made = type(env)(type(env.spec)(config))
    env.close()
    return made


def _copied(observation: Any) -> Any:
    if isinstance(observation, dict):
        return {key: _copied(value) for key, value in observation.items()}
    return np.array(observation)


def _with_rows(observation: Any, rows: Array, fresh: Any) -> Any:
    """A copy of the observation with some rows replaced."""
    if isinstance(observation, dict):
        return {key: _with_rows(value, rows, fresh[key]) for key, value in observation.items()}
    found = np.array(observation)
    found[rows] = fresh
    return found
