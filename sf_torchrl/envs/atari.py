"""Atari games as gymnasium envs, prepared as has become usual. Free of torch."""

from __future__ import annotations

import difflib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import AtariPreprocessing

from sf_torchrl.envs.frames import FrameStack
from sf_torchrl.envs.spaces import EnvError

try:
    import ale_py
    import ale_py.roms
    import cv2  # noqa: F401 (gymnasium's wrapper resizes with it)
except ImportError as error:
    raise EnvError(f"Atari needs an extra ({error}): pip install 'sf_torchrl[atari]'") from None

_FRAMES_PER_S = 60
_MAX_FRAMES = 108_000
"""Frames in one episode, half an hour: the usual limit."""


class AtariEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An Atari game: grey, small, stacked pictures, frames skipped, episodes begun at random.

    The preparation is gymnasium's ``AtariPreprocessing`` (maximum of the last two frames, no-ops at
    first); stacked here. Rewards are the game's own: clip them in the loss (``reward_clip``).

    Args:
        game: a ROM that ships with ale-py, such as ``pong`` or ``space_invaders``.
        frame_skip: frames in one env step.
        frame_stack: newest pictures in one observation.
        size: height and width of a picture.
        grayscale: False keeps the colours, three channels a picture.
        channel_order: ``first`` or ``last``.
        repeat_action_probability: how often the last action is repeated instead (sticky actions).
        noop_max: an episode begins with 1 to this many frames of doing nothing.
        fire_on_reset: press fire then, in games that wait for it.
        terminal_on_life_loss: losing a life ends the episode.
        render_mode: ``rgb_array`` or None; pictures of 210 by 160, in colour.

    Raises:
        EnvError: there is no such game, or a size is not positive.
    """

    def __init__(  # noqa: PLR0913 (settings)
        self,
        game: str = "pong",
        *,
        frame_skip: int = 4,
        frame_stack: int = 4,
        size: int = 84,
        grayscale: bool = True,
        channel_order: str = "first",
        repeat_action_probability: float = 0.0,
        noop_max: int = 30,
        fire_on_reset: bool = True,
        terminal_on_life_loss: bool = False,
        render_mode: str | None = None,
    ) -> None:
        if frame_skip < 1:
            raise EnvError(f"frame_skip={frame_skip} must be at least 1")
        channels = 1 if grayscale else 3
        self._stack = FrameStack(size, size, channels, frame_stack, channel_order)
        env: gymnasium.Env[Any, Any] = gymnasium.make(
            _env_id(game),
            frameskip=1,
            repeat_action_probability=repeat_action_probability,
            max_num_frames_per_episode=_MAX_FRAMES,
            render_mode=render_mode,
            disable_env_checker=True,
        )
        meanings = env.unwrapped.get_action_meanings()  # type: ignore[attr-defined]
        self._fire = meanings.index("FIRE") if fire_on_reset and "FIRE" in meanings else None
        super().__init__(
            AtariPreprocessing(
                env,
                noop_max=noop_max,
                frame_skip=frame_skip,
                screen_size=size,
                terminal_on_life_loss=terminal_on_life_loss,
                grayscale_obs=grayscale,
            )
        )
        self.metadata = {
            **env.metadata,
            "frame_skip": frame_skip,
            "render_fps": _FRAMES_PER_S / frame_skip,
            "aspect_ratio": 4 / 3,  # a television's: the pixels are not square
        }
        self.observation_space = spaces.Box(0, 255, self._stack.shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        picture, info = self.env.reset(seed=seed, options=options)
        if self._fire is not None:
            picture, _, terminated, truncated, info = self.env.step(self._fire)
            if terminated or truncated:
                picture, info = self.env.reset()
        return self._stack.reset(picture), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Hold the joystick for ``frame_skip`` frames."""
        picture, reward, terminated, truncated, info = self.env.step(action)
        return self._stack.add(picture), float(reward), terminated, truncated, info


def _env_id(game: str) -> str:
    games = ale_py.roms.get_all_rom_ids()
    if game not in games:
        close = difflib.get_close_matches(game, games, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise EnvError(f"there is no Atari game {game!r} among the {len(games)} of ale-py{hint}")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    return f"ALE/{game.title().replace('_', '')}-v5"
