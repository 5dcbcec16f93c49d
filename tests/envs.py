"""Small real environments that tell from their observations whether a rollout is right.

Free of torch. Imported by name (``from envs import CountingEnv``) in tests and in worker processes,
which get the ``sys.path`` of the process that started them.
"""

import ctypes
import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces

NO_ACTION = -1


def in_turn(choices, episode):
    """The choice for an episode: a tuple is gone through again and again."""
    return choices[episode % len(choices)] if isinstance(choices, tuple) else choices


class CountingEnv(gymnasium.Env):
    """Observes ``(seed, episode, step, last action)`` as int64; rewards ``10 * step + action``.

    Args:
        length: steps of an episode; a tuple gives each episode its own.
        ends: ``terminated``, ``truncated``, ``both`` or ``never``; a tuple gives each its own.
        num_actions: how many actions there are.
        first_action: the smallest of them.
        reuse_buffer: return the same array each time, overwritten.
    """

    def __init__(
        self, length=5, ends="terminated", num_actions=2, first_action=0, reuse_buffer=False
    ):
        self.observation_space = spaces.Box(-1, 2**62, (4,), np.int64)
        self.action_space = spaces.Discrete(num_actions, start=first_action)
        self._length, self._ends, self._reuse_buffer = length, ends, reuse_buffer
        self._buffer = np.zeros(4, np.int64)
        self._seed, self._episode, self._step = NO_ACTION, NO_ACTION, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self._seed = seed
        self._episode += 1
        self._step = 0
        return self._observe(NO_ACTION), {}

    def step(self, action):
        assert self.action_space.contains(action), action  # an integer, in range
        action = int(action)
        reward = 10 * self._step + action
        self._step += 1
        ends = in_turn(self._ends, self._episode)
        last = self._step == in_turn(self._length, self._episode)
        terminated = last and ends in ("terminated", "both")
        truncated = last and ends in ("truncated", "both")
        return self._observe(action), reward, terminated, truncated, {}

    def _observe(self, action):
        buffer = self._buffer if self._reuse_buffer else self._buffer.copy()
        buffer[:] = (self._seed, self._episode, self._step, action)
        return buffer


class Ledger:
    """Follows CountingEnvs through their rollouts and objects to the first wrong step.

    Knows nothing of slots, batches or processes: each env is told apart by the seed it observes,
    and its rollouts must come in order and without a gap.

    Args:
        length, ends, first_action: as the envs were made.
    """

    def __init__(self, length=5, ends="terminated", first_action=0):
        self._length, self._ends, self._first_action = length, ends, first_action
        self._due = {}  # seed -> (episode, step, last action) that must be observed next
        self._return = {}  # seed -> sum of rewards of its current episode
        self.traj_ids = {}  # (seed, episode) -> id
        self.episodes = []  # (return, length) as they ended
        self.num_steps = 0

    @property
    def seeds(self):
        """Of every env met so far."""
        return set(self._due)

    def follow(self, batch, key="observation"):
        """Check every step of ``[B, T]`` rollouts."""
        rows = zip(
            batch[key].tolist(),
            batch["action"].tolist(),
            batch["next", key].tolist(),
            batch["next", "reward"].squeeze(-1).tolist(),
            batch["next", "terminated"].squeeze(-1).tolist(),
            batch["next", "truncated"].squeeze(-1).tolist(),
            batch["next", "done"].squeeze(-1).tolist(),
            batch["collector", "traj_ids"].tolist(),
            strict=True,
        )
        for row in rows:
            for step in zip(*row, strict=True):
                self._follow_step(*step)

    def _follow_step(self, seen, action, following, reward, terminated, truncated, done, traj_id):
        seed = seen[0]
        episode, step, last_action = self._due.get(seed, (0, 0, NO_ACTION))
        assert seen == [seed, episode, step, last_action]
        env_action = action + self._first_action
        assert following == [seed, episode, step + 1, env_action]  # even where a reset follows
        assert reward == 10 * step + env_action
        ends = in_turn(self._ends, episode)
        last = ends != "never" and step + 1 == in_turn(self._length, episode)
        assert terminated == (last and ends in ("terminated", "both"))
        assert truncated == (last and ends in ("truncated", "both"))
        assert done == last
        assert self.traj_ids.setdefault((seed, episode), traj_id) == traj_id
        self._return[seed] = self._return.get(seed, 0) + reward
        self._due[seed] = (episode, step + 1, env_action)
        if last:
            self.episodes.append((self._return.pop(seed), step + 1))
            self._due[seed] = (episode + 1, 0, NO_ACTION)
        self.num_steps += 1

    def check_traj_ids(self):
        """No two episodes share an id."""
        assert len(set(self.traj_ids.values())) == len(self.traj_ids)


def pixels_of(step):
    """``[..., 2, 3]`` uint8 picture that belongs to a step."""
    return ((np.asarray(step)[..., None, None] + np.arange(6).reshape(2, 3)) % 256).astype(np.uint8)


class CountingDictEnv(CountingEnv):
    """The same in a Dict: ``count``, a nested uint8 ``(camera, pixels)`` and a scalar ``speed``."""

    def __init__(self, **options):
        super().__init__(**options)
        self.observation_space = spaces.Dict(
            count=self.observation_space,
            camera=spaces.Dict(pixels=spaces.Box(0, 255, (2, 3), np.uint8)),
            speed=spaces.Box(-np.inf, np.inf, (), np.float32),
        )

    def _observe(self, action):
        return {
            "count": super()._observe(action),
            "camera": {"pixels": pixels_of(self._step)},
            "speed": np.float32(self._step / 2),
        }


class BoxActionEnv(gymnasium.Env):
    """Observes the action that it was given; refuses one out of bounds, and overwrites it."""

    LOW, HIGH = (-1.0, 0.0), (1.0, 3.0)

    def __init__(self, length=7):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(np.float32(self.LOW), np.float32(self.HIGH))
        self._length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._step = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self._step += 1
        seen = action.copy()
        action[:] = np.nan
        return seen, 0.0, self._step == self._length, False, {}


class BrokenAndEnded(BrokenPipeError, EOFError):
    """Both errors that a pipe has."""


class FaultyEnv(CountingEnv):
    """Fails in the way and the place it is told to, except in the process ``spared``.

    Args:
        fault: ``raise``, ``raise_error_of_pipes``, ``system_exit``, ``sigkill``, ``exit``, ``hang``
            or ``hang_holding_gil``.
        where: ``constructor``, ``reset`` or ``step``.
        at: calls of reset or step that still succeed.
        spared: process in which nothing fails: that of the test, which tries the env out.
        only_first: path of a file; the first env to fail makes it, and no other fails.
        options: of CountingEnv.
    """

    def __init__(self, fault, where="step", at=10, spared=0, only_first=None, **options):
        super().__init__(**options)
        self._fault, self._where, self._left = fault, where, at
        self._spared, self._only_first = spared, only_first
        if where == "constructor":
            self._fail()

    def reset(self, *, seed=None, options=None):
        self._count_down("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self._count_down("step")
        return super().step(action)

    def _count_down(self, where):
        if where != self._where:
            return
        if self._left == 0:
            self._fail()
        self._left -= 1

    def _fail(self):
        if os.getpid() == self._spared:
            return
        if self._only_first is not None:
            try:
                os.close(os.open(self._only_first, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if self._fault == "raise":
            raise RuntimeError("the simulator is on fire")
        if self._fault == "raise_error_of_pipes":
            raise BrokenAndEnded("the simulator hung up")
        if self._fault == "system_exit":
            raise SystemExit(0)
        if self._fault == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "exit":
            os._exit(7)
        print("hanging", flush=True)
        if self._fault == "hang":
            time.sleep(1e6)
        ctypes.PyDLL(None).sleep(10**6)  # unlike CDLL, keeps the GIL


class StuckInCloseEnv(FaultyEnv):
    """Fails, and then hangs where it is closed."""

    def close(self):
        if os.getpid() != self._spared:
            time.sleep(3600)


class OldAPIEnv(gymnasium.Env):
    """As before Gym 0.26: reset returns the observation alone, step returns four values."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self):
        return np.zeros(2, np.float32)

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, {}


class OldStepEnv(CountingEnv):
    """Resets as gymnasium does, steps as Gym did."""

    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, info


class GraphEnv(CountingEnv):
    """Observes a space that has no fixed size."""

    def __init__(self):
        super().__init__()
        self.observation_space = spaces.Graph(spaces.Box(-1, 1, (3,)), None)


class WrongShapeEnv(CountingEnv):
    """Observes less than it promises."""

    def _observe(self, action):
        return super()._observe(action)[:3]
