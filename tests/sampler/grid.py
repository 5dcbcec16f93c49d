"""A small world and agents for samplers."""

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

# Down, down, right, ...: the way through garage's 4 x 4 grid of which tests know every step.
PATH_ACTIONS = [2, 2, 1, 1, 1, 2]
GOAL = 15


class Grid(gymnasium.Env):
    """Cells 0 to 15 by rows; left, right, down, up are 0 to 3. The goal ends an episode."""

    observation_space = Box(0, 15, (1,), np.int64)
    action_space = Discrete(4)

    def __init__(self, goal=GOAL):
        self._seen = np.zeros(1, np.int64)  # the same memory in every step
        self._goal = goal

    def set_task(self, goal):
        self._goal = goal

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._seen[0] = 0
        return self._seen, {}

    def step(self, action):
        row, column = divmod(int(self._seen[0]), 4)
        row += {2: 1, 3: -1}.get(int(action), 0)
        column += {0: -1, 1: 1}.get(int(action), 0)
        self._seen[0] = 4 * min(max(row, 0), 3) + min(max(column, 0), 3)
        at_goal = bool(self._seen[0] == self._goal)
        info = {"goal": self._goal, "name": "grid", "pid": os.getpid()}
        return self._seen, float(at_goal), at_goal, False, info


class Lucky(gymnasium.Env):
    """Tells the number that its seed drew."""

    observation_space = Dict({"number": Box(0, 1, (), np.float64), "age": Box(0, 99, (2,))})
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._age = 0
        return self._observe(), {}

    def _observe(self):
        return {"number": self.np_random.random(), "age": np.full(2, self._age, np.float32)}

    def step(self, action):
        self._age += 1
        return self._observe(), 1.0, False, self._age == 3, {}


class Failing(Grid):
    """Fails in a way of its choice at its n-th step."""

    def __init__(self, how, at=3):
        super().__init__()
        self._how, self._left = how, at

    def step(self, action):
        self._left -= 1
        if self._left == 0:
            if self._how.startswith("raise"):
                raise RuntimeError("the floor gave way")
            if self._how == "kill_but_for_a_helper" and os.fork() == 0:
                time.sleep(3600)  # holds whatever the worker held open
            if self._how.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().step(action)

    def close(self):
        if self._how == "raise_and_hang_in_close":
            time.sleep(3600)


class Large(Grid):
    """Observes 2 MB, which no socket holds at once, and tells how many episodes it has begun."""

    observation_space = Box(0, 255, (2_000_000,), np.uint8)
    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        super().reset(seed=seed)
        return np.zeros(2_000_000, np.uint8), {}

    def step(self, action):
        _, reward, terminated, truncated, _ = super().step(action)
        info = {"episodes": self.episodes}
        return np.zeros(2_000_000, np.uint8), reward, terminated, truncated, info


class Scripted:
    """garage's agent that walks a path; it is reset where an episode begins."""

    def __init__(self, actions=PATH_ACTIONS):
        self._actions = list(actions)

    def reset(self):
        self._next = 0

    def get_action(self, observation):
        action = self._actions[self._next % len(self._actions)]
        self._next += 1
        return action, {"place": self._next, "note": "text"}


class Constant:
    """Always the same action, which is its parameter."""

    def __init__(self, action):
        self._action = action

    def get_action(self, observation):
        return self._action, {}

    def get_param_values(self):
        return {"action": self._action}

    def set_param_values(self, params):
        self._action = params["action"]
