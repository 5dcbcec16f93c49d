"""VizDoom scenarios as gymnasium envs. Free of torch."""

from __future__ import annotations

import difflib
import itertools
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sf_torchrl.envs.frames import Array, FrameStack
from sf_torchrl.envs.spaces import EnvError

try:
    import cv2
    import vizdoom
except ImportError as error:
    raise EnvError(f"VizDoom needs an extra ({error}): pip install 'sf_torchrl[doom]'") from None

TICS_PER_S = 35
"""Doom's clock."""

_EXIT_S = 0.5
"""How long a game may take to end."""


class DoomEnv(gymnasium.Env[Any, Any]):
    """A VizDoom scenario: what the player sees, as small colour pictures.

    Observes uint8 pictures, or with ``game_variables`` a ``Dict`` of ``screen`` and
    ``gamevariables`` (float32). Actions are one of n: nothing, then each button of the scenario,
    then combinations. The scenario's time limit truncates the episode, with the picture that
    follows; its death or goal terminates it, where VizDoom has no picture and the last one is
    observed again. Rewards are the scenario's own.

    Args:
        scenario: name of one that ships with VizDoom (``basic``), or path of a ``.cfg`` file.
        width: of the picture.
        height: of the picture; 128 by 72 is Sample Factory's.
        frame_skip: tics (1/35 s) in one env step.
        frame_stack: newest pictures in one observation.
        channel_order: ``last`` or ``first``; the former is what VizDoom writes.
        game_variables: names of VizDoom's, such as HEALTH or AMMO2, observed beside the picture.
        max_buttons_pressed: buttons in one action.
        render_mode: ``rgb_array`` or None; pictures of 160 by 120.

    Raises:
        EnvError: there is no such scenario or game variable, or a size is not positive.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 (gymnasium's)

    def __init__(  # noqa: PLR0913 (settings)
        self,
        scenario: str = "basic",
        *,
        width: int = 128,
        height: int = 72,
        frame_skip: int = 4,
        frame_stack: int = 1,
        channel_order: str = "last",
        game_variables: Sequence[str] = (),
        max_buttons_pressed: int = 1,
        render_mode: str | None = None,
    ) -> None:
        if isinstance(game_variables, str):
            raise EnvError(f"game_variables={game_variables!r} must be a list of names")
        if frame_skip < 1 or max_buttons_pressed < 1:
            raise EnvError(
                f"frame_skip={frame_skip} and max_buttons_pressed={max_buttons_pressed} must be at "
                "least 1"
            )
        self._frame_skip = frame_skip
        self.render_mode = render_mode
        self.metadata = {
            **DoomEnv.metadata,
            "frame_skip": frame_skip,
            "render_fps": TICS_PER_S / frame_skip,
            "aspect_ratio": 4 / 3,
        }
        self._game = self._configured_game(scenario, game_variables)
        self._time_limit = self._game.get_episode_timeout()
        if self._time_limit:  # counted from the tic at which an episode starts
            self._time_limit += self._game.get_episode_start_time()
        self._game.set_episode_timeout(0)  # kept here: VizDoom has no picture of what follows
        self._started = False
        self._variables = np.zeros(len(game_variables), np.float32)
        self._size = (width, height)
        self._stack = FrameStack(height, width, 3, frame_stack, channel_order)
        self._screen: Array = np.zeros((120, 160, 3), np.uint8)
        screen = spaces.Box(0, 255, self._stack.shape, np.uint8)
        self.observation_space = (
            spaces.Dict(
                screen=screen,
                gamevariables=spaces.Box(-np.inf, np.inf, self._variables.shape, np.float32),
            )
            if game_variables
            else screen
        )
        self._actions = _actions(self._game.get_available_buttons_size(), max_buttons_pressed)
        self.action_space = spaces.Discrete(len(self._actions))

    def _configured_game(self, scenario: str, game_variables: Sequence[str]) -> vizdoom.DoomGame:
        game = vizdoom.DoomGame()
        game.load_config(str(_scenario_file(scenario)))
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_160X120)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(vizdoom.Mode.PLAYER)
        known = vizdoom.GameVariable.__members__
        unknown = [name for name in game_variables if name not in known]
        if unknown:
            close = difflib.get_close_matches(unknown[0], known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise EnvError(f"VizDoom has no game variable {unknown[0]!r}{hint}")
        game.set_available_game_variables([known[name] for name in game_variables])
        return game

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin an episode; the first one starts the game."""
        super().reset(seed=seed)
        if seed is not None or not self._started:
            self._game.set_seed(int(self.np_random.integers(2**31)))
        if self._started:
            self._game.new_episode()
        else:
            self._start_game()
        self._look()
        return self._observation(self._stack.reset(self._small_screen())), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Hold the buttons for ``frame_skip`` tics."""
        game = self._game
        reward = game.make_action(self._actions[int(action)], self._frame_skip)
        terminated = game.is_episode_finished()
        truncated = not terminated and 0 < self._time_limit <= game.get_episode_time()
        if not terminated:
            self._look()
        observation = self._observation(self._stack.add(self._small_screen()))
        return observation, reward, terminated, truncated, {}

    def _start_game(self) -> None:
        """Start it in a folder of its own, which goes with this env.

        The game makes files where it starts. In a shared folder the game's processes race for them,
        and one start in ten fails where two processes start at once, with a segmentation fault.
        """
        self._directory = tempfile.TemporaryDirectory(prefix="sf_torchrl_vizdoom_")
        here = os.getcwd()
        os.chdir(self._directory.name)
        try:
            self._game.init()
        finally:
            os.chdir(here)
        self._started = True

    def _look(self) -> None:
        state = self._game.get_state()
        self._screen = state.screen_buffer
        if len(self._variables):
            self._variables[:] = state.game_variables

    def _small_screen(self) -> Array:
        return cv2.resize(  # type: ignore[no-any-return]
            self._screen, self._size, interpolation=cv2.INTER_NEAREST
        )

    def _observation(self, screen: Array) -> Any:
        if not len(self._variables):
            return screen
        return {"screen": screen, "gamevariables": self._variables.copy()}

    def render(self) -> Any:
        """The newest picture, 120 by 160, with ``render_mode`` rgb_array."""
        return self._screen.copy() if self.render_mode == "rgb_array" else None

    def close(self) -> None:
        """End the game's process."""
        self._game.close()
        if not self._started:
            return
        settings = Path(self._directory.name) / "_vizdoom.ini"
        deadline = time.monotonic() + _EXIT_S
        while not settings.exists() and time.monotonic() < deadline:
            time.sleep(0.002)  # the last that the game does is to save them, or to complain
        self._directory.cleanup()
        self._started = False


def _actions(num_buttons: int, max_pressed: int) -> list[list[int]]:
    """Nothing, each button, then each combination of up to ``max_pressed``."""
    pressed = itertools.chain.from_iterable(
        itertools.combinations(range(num_buttons), count) for count in range(max_pressed + 1)
    )
    return [[int(button in chosen) for button in range(num_buttons)] for chosen in pressed]


def _scenario_file(scenario: str) -> Path:
    shipped = Path(vizdoom.scenarios_path)
    for file in (shipped / f"{scenario}.cfg", Path(scenario)):
        if file.suffix == ".cfg" and file.is_file():
            return file.resolve()  # the game starts in another folder
    names = sorted(file.stem for file in shipped.glob("*.cfg"))
    close = difflib.get_close_matches(scenario, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise EnvError(
        f"there is no VizDoom scenario {scenario!r}{hint} (those that ship: {', '.join(names)})"
    )
