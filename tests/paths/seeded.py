"""Envs whose episodes follow from one number, however often they are reset before a step."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit

LIMIT = 10


class Seeded(gymnasium.Wrapper):
    """The n-th episode begins from seed ``base + 1000 n``; a seeded reset sets the base.

    Args:
        env: what is wrapped.
        base: before any seed is given.
    """

    def __init__(self, env, base=0):
        super().__init__(env)
        self._base, self._episode, self._has_stepped = base, 0, False

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self._base, self._episode = int(seed), 0
        elif self._has_stepped:
            self._episode += 1
        self._has_stepped = False
        return self.env.reset(seed=self._base + 1000 * self._episode, options=options)

    def step(self, action):
        self._has_stepped = True
        return self.env.step(action)

    @property
    def base(self):
        return self._base


class Telling(gymnasium.ObservationWrapper):
    """Observes its base seed beside the rest, so that a batch says where its rows come from."""

    def __init__(self, env):
        super().__init__(env)
        self.observation_space = Dict(
            {"seen": env.observation_space, "base": Box(0, 2**62, (1,), np.int64)}
        )

    def observation(self, observation):
        return {"seen": observation, "base": np.array([self.env.base], np.int64)}


class Recast(gymnasium.ObservationWrapper):
    """The same numbers in another dtype."""

    def __init__(self, env, dtype):
        super().__init__(env)
        low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
        self.observation_space = Box(low, high, env.observation_space.shape, dtype)

    def observation(self, observation):
        if self.observation_space.dtype == np.uint8:
            observation = np.abs(observation * 50)
        return observation.astype(self.observation_space.dtype)


def cartpole(base=0, limit=LIMIT):
    """Most episodes end by themselves, some by the limit."""
    return Seeded(TimeLimit(gymnasium.make("CartPole-v1"), limit), base)


def doubles(base=0):
    return Recast(cartpole(base), np.float64)


def picture(base=0):
    return Recast(cartpole(base), np.uint8)


def pendulum(base=0):
    return Seeded(gymnasium.make("Pendulum-v1", max_episode_steps=LIMIT), base)


def telling(base=0):
    return Telling(cartpole(base))


def telling_pair():
    """Two at once."""
    return SyncVectorEnv([telling] * 2, autoreset_mode=AutoresetMode.DISABLED)
