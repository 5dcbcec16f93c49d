"""Videos of a policy's episodes."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from torch import nn

from sf_torchrl.envs.factory import EnvFactory, env_name, gymnasium_env, make_env
from sf_torchrl.evaluation import EvaluationResult, evaluate_policy

_MIN_HEIGHT = 480
"""Smaller pictures are enlarged to at least this, by a whole number."""
_DEFAULT_FPS = 30


class VideoWriter:
    """An mp4 file (H.264) made of an env's pictures.

    Pictures keep the aspect ratio that the env names in ``metadata["aspect_ratio"]`` (Atari's
    pixels are not square), the file the frame rate in ``metadata["render_fps"]``.

    Args:
        file: where to write; the folder must exist.
        metadata: of the env.

    Raises:
        ValueError: PyAV is not installed, or the file cannot be written.
    """

    def __init__(self, file: Path, metadata: dict[str, Any]) -> None:
        try:
            import av
        except ImportError as error:
            raise ValueError(
                f"videos need an extra ({error}): pip install 'sf_torchrl[video]'"
            ) from error
        self._frame_type = av.VideoFrame
        self._aspect_ratio: float | None = metadata.get("aspect_ratio")
        self.fps = Fraction(metadata.get("render_fps") or _DEFAULT_FPS).limit_denominator(1000)
        try:
            self._container = av.open(str(file), "w", format="mp4")
        except OSError as error:
            raise ValueError(f"cannot write video {str(file)!r}: {error.strerror}") from error
        self._stream = self._container.add_stream("libx264", rate=self.fps)
        self._stream.pix_fmt = "yuv420p"
        self.size: tuple[int, int] | None = None
        """Width and height in pixels, known from the first picture on."""
        self.frames = 0
        """Pictures so far."""

    def add(self, picture: np.ndarray[Any, Any]) -> None:
        """Append a picture, ``[height, width, 3]`` uint8.

        Raises:
            ValueError: it is none.
        """
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise ValueError(
                f"the env rendered {picture.dtype} of shape {picture.shape}, and no picture of "
                "[height, width, 3] bytes"
            )
        if self.size is None:
            self.size = self._stream.width, self._stream.height = self._displayed(picture.shape)
        frame = self._frame_type.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
        width, height = self.size
        self._write(
            frame.reformat(width=width, height=height, format="yuv420p", interpolation="POINT")
        )
        self.frames += 1

    def _displayed(self, shape: tuple[int, ...]) -> tuple[int, int]:
        height, width, _ = shape
        factor = -(-_MIN_HEIGHT // height)
        ratio = self._aspect_ratio or width / height
        height *= factor
        return 2 * round(height * ratio / 2), 2 * round(height / 2)  # H.264 wants even numbers

    def _write(self, frame: Any) -> None:
        for packet in self._stream.encode(frame):
            self._container.mux(packet)

    def close(self) -> None:
        """Finish the file."""
        if self.frames:
            self._write(None)
        self._container.close()


def record_video(
    policy: nn.Module,
    create_env_fn: EnvFactory,
    file: Path,
    num_episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
) -> tuple[EvaluationResult, VideoWriter]:
    """Run episodes one after the other and write what the env renders.

    Args:
        policy: TensorDict module that reads observations and writes ``action``.
        create_env_fn: makes the env with ``render_mode="rgb_array"``.
        file: the mp4 file.
        num_episodes: how many.
        deterministic: take the most probable action instead of a sample.
        seed: of env and sampling.

    Returns:
        What the episodes came to, and the closed writer with size, frame rate and count.

    Raises:
        ValueError: the env renders nothing, or the file cannot be written.
    """
    try:
        probe = gymnasium_env(make_env(create_env_fn))
    except TypeError as error:  # it knows no render_mode
        raise ValueError(f"env {env_name(create_env_fn)!r} renders no pictures: {error}") from None
    metadata, mode = dict(probe.metadata), probe.render_mode
    probe.close()
    if mode != "rgb_array":
        raise ValueError(
            f"env {env_name(create_env_fn)!r} renders no pictures (render_mode={mode!r}); it must "
            "be made with render_mode='rgb_array'"
        )
    writer = VideoWriter(file, metadata)

    def watch(env: gymnasium.Env[Any, Any]) -> None:
        writer.add(np.asarray(env.render()))

    try:
        result = evaluate_policy(
            policy,
            create_env_fn,
            num_episodes,
            deterministic=deterministic,
            seed=seed,
            num_envs=1,
            watch=watch,
        )
    finally:
        writer.close()
    return result, writer
