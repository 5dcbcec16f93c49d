"""What the command line does with a trained policy: ``evaluate`` and ``play``."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Any

import torch
import yaml

from sf_torchrl.config import NetworkConfig
from sf_torchrl.envs.factory import EnvFactory, env_name, with_arguments
from sf_torchrl.envs.try_out import try_out
from sf_torchrl.evaluation import evaluate_policy
from sf_torchrl.models.actor_critic import ActorCritic
from sf_torchrl.video import record_video

CONFIG_FILE = "config.yaml"


class UsageError(Exception):
    """The user asked for something that cannot be: one line says what and what to do."""


def evaluate(
    checkpoint: str,
    episodes: int = 100,
    deterministic: bool = True,
    env: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Run episodes of a trained policy and print what they came to.

    Args:
        checkpoint: a checkpoint that ``fit`` wrote.
        episodes: how many episodes to run.
        deterministic: take the most probable action; false samples, as in training.
        env: env id or ``module:function``; by default that of ``config.yaml`` beside the
            checkpoint's folder.
        env_kwargs: keyword arguments of the env, over those in ``config.yaml``.
        seed: seed of envs and sampling.
        json: print one JSON object as the last line.
    """
    create_env_fn = _env_of(checkpoint, env, env_kwargs)
    policy = load_policy(checkpoint, create_env_fn)
    result = evaluate_policy(
        policy, create_env_fn, episodes, deterministic=deterministic, seed=seed
    ).summary()
    if json:
        print(json_format.dumps(result))
        return
    how = "deterministic" if deterministic else "sampled"
    print(f"{env_name(create_env_fn)}, {episodes} episodes, {how}")
    for name in ("return", "length"):
        print(
            f"{name:>8}: mean {result[f'mean_{name}']:.2f}  std {result[f'std_{name}']:.2f}  "
            f"min {result[f'min_{name}']:.2f}  max {result[f'max_{name}']:.2f}"
        )


def play(
    checkpoint: str,
    video: str = "video.mp4",
    episodes: int = 3,
    deterministic: bool = True,
    env: str | None = None,
    env_kwargs: dict[str, Any] | None = None,
    seed: int = 0,
) -> None:
    """Record episodes of a trained policy, with true aspect ratio and frame rate.

    Args:
        checkpoint: a checkpoint that ``fit`` wrote.
        video: the mp4 file to write.
        episodes: how many episodes, one after the other.
        deterministic: take the most probable action; false samples, as in training.
        env: env id or ``module:function``; by default that of ``config.yaml`` beside the
            checkpoint's folder.
        env_kwargs: keyword arguments of the env, over those in ``config.yaml``.
        seed: seed of env and sampling.
    """
    if not Path(video).absolute().parent.is_dir():
        raise UsageError(f"video: there is no folder {str(Path(video).absolute().parent)!r}")
    create_env_fn = _env_of(checkpoint, env, env_kwargs)
    policy = load_policy(checkpoint, create_env_fn)
    rendered = with_arguments(create_env_fn, {"render_mode": "rgb_array"})
    result, written = record_video(
        policy, rendered, Path(video), episodes, deterministic=deterministic, seed=seed
    )
    width, height = written.size or (0, 0)
    returns = ", ".join(f"{episode.episode_return:g}" for episode in result.episodes)
    print(
        f"{video}: {env_name(create_env_fn)}, {written.frames} pictures of {width}x{height} at "
        f"{float(written.fps):g} a second; return of {episodes} episodes: {returns}"
    )


def _env_of(checkpoint: str, env: str | None, env_kwargs: dict[str, Any] | None) -> EnvFactory:
    if not Path(checkpoint).is_file():
        raise UsageError(f"there is no checkpoint {checkpoint!r}")
    kwargs: dict[str, Any] = {}
    if env is None:
        env, kwargs = _trained_env(Path(checkpoint))
    return with_arguments(env, kwargs | (env_kwargs or {}))


def _trained_env(checkpoint: Path) -> tuple[str, dict[str, Any]]:
    for directory in (checkpoint.parent, checkpoint.parent.parent):
        file = directory / CONFIG_FILE
        if file.is_file():
            data = yaml.safe_load(file.read_text())["data"]
            return str(data["env"]), data.get("env_kwargs") or {}
    raise UsageError(
        f"there is no {CONFIG_FILE} beside {str(checkpoint)!r} to name the env; give --env"
    )


def read_checkpoint(checkpoint: str) -> tuple[NetworkConfig, dict[str, torch.Tensor]]:
    """Network and weights in a checkpoint.

    Raises:
        UsageError: the file is no checkpoint of ours.
    """
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        return NetworkConfig(**saved["sf_torchrl"]["network"]), saved["state_dict"]
    except Exception as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{checkpoint!r} is no checkpoint of sf-torchrl fit: {reason}") from error


def load_policy(checkpoint: str, env: EnvFactory) -> ActorCritic:
    """The policy in a checkpoint, for an env.

    Raises:
        UsageError: the file is no checkpoint of ours, or the env does not fit it.
    """
    network, state = read_checkpoint(checkpoint)
    policy = ActorCritic(try_out(env), network)
    prefix = "policy."
    weights = {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise UsageError(
            f"{checkpoint!r} does not fit env {env_name(env)!r}: {' '.join(lines)}"
        ) from error
    return policy
