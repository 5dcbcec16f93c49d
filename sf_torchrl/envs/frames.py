"""Pictures on their way into an observation: size, channel order, stacking. Free of torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from sf_torchrl.envs.spaces import EnvError

Array = np.ndarray[Any, Any]


class FrameStack:
    """The last pictures of an episode as one, stacked along the channels, oldest first.

    Gymnasium's wrapper adds a dimension instead, which leaves a colour picture with four.

    Args:
        height: of one picture.
        width: of one picture.
        channels: of one picture.
        count: how many.
        channel_order: ``first`` makes ``[channels, height, width]``, ``last`` the other.

    Raises:
        EnvError: an unknown channel order, or a size that is not positive.
    """

    def __init__(
        self, height: int, width: int, channels: int, count: int, channel_order: str
    ) -> None:
        for name, value in (("height", height), ("width", width), ("frame_stack", count)):
            if value < 1:
                raise EnvError(f"{name}={value} must be at least 1")
        if channel_order not in ("first", "last"):
            raise EnvError(f"channel_order={channel_order!r} must be first or last")
        self._first = channel_order == "first"
        self._channels, self._count = channels, count
        stacked = channels * count
        self.shape = (stacked, height, width) if self._first else (height, width, stacked)
        self._pictures: Array = np.zeros(self.shape, np.uint8)

    def reset(self, picture: Array) -> Array:
        """Begin an episode: every picture of the stack is its first.

        Args:
            picture: ``[height, width, channels]`` uint8, or without channels if there is one.
        """
        for _ in range(self._count):
            self._push(picture)
        return np.array(self._pictures)

    def add(self, picture: Array) -> Array:
        """The stack with ``picture`` as its newest, a copy."""
        self._push(picture)
        return np.array(self._pictures)

    def _push(self, picture: Array) -> None:
        if picture.ndim == 2:
            picture = picture[..., None]
        stack, channels = self._pictures, self._channels
        if self._first:
            stack[:-channels] = stack[channels:]
            stack[-channels:] = picture.transpose(2, 0, 1)
        else:
            stack[..., :-channels] = stack[..., channels:]
            stack[..., -channels:] = picture
