"""A task that needs memory: the T-maze. Free of torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sf_torchrl.envs.spaces import EnvError

FORWARD, LEFT, RIGHT = 0, 1, 2


class TMaze(gymnasium.Env[Any, Any]):
    """A sign at the start says which way to turn at the end of a corridor, and is seen no more.

    Observes four numbers: the sign says left, the sign says right, this is the corridor, this is
    the junction. Actions are forward, left, right; only forward leads on in the corridor. Turning
    at the junction ends the episode with the reward 1 if the sign said so, else 0: without memory
    half of the episodes succeed. An episode is truncated after three times the corridor's length.

    Args:
        length: steps from the start to the junction.

    Raises:
        EnvError: it is not positive.

    Source: Bakker 2001, Reinforcement Learning with Long Short-Term Memory (NeurIPS 14).
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 (gymnasium's)

    def __init__(self, length: int = 10) -> None:
        if not isinstance(length, int) or length < 1:
            raise EnvError(f"length={length} must be an integer of at least 1")
        self.length = length
        self.observation_space = spaces.Box(0.0, 1.0, (4,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._sign, self._place, self._steps = LEFT, 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Go to the start, where a new sign stands."""
        super().reset(seed=seed)
        self._sign = int(self.np_random.integers(LEFT, RIGHT + 1))
        self._place = self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Walk."""
        self._steps += 1
        at_junction = self._place == self.length
        terminated = at_junction and action != FORWARD
        reward = float(terminated and action == self._sign)
        if not at_junction and action == FORWARD:
            self._place += 1
        truncated = not terminated and self._steps >= 3 * self.length
        return self._observation(), reward, terminated, truncated, {}

    def _observation(self) -> np.ndarray[Any, Any]:
        seen = np.zeros(4, np.float32)
        if self._place == 0:
            seen[self._sign - LEFT] = 1.0
        seen[3 if self._place == self.length else 2] = 1.0
        return seen
