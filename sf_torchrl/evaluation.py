"""Evaluation: episodes of a policy, without learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn

from sf_torchrl.envs.factory import EnvFactory, env_name, gymnasium_env, make_env
from sf_torchrl.envs.spaces import EnvSpecs, pick, read_specs
from sf_torchrl.memory.batch import Episode


@dataclass(frozen=True)
class EvaluationResult:
    """What the episodes came to."""

    episodes: tuple[Episode, ...]

    def summary(self) -> dict[str, float]:
        """Mean, standard deviation, minimum and maximum of return and length, and the count."""
        found: dict[str, float] = {"episodes": len(self.episodes)}
        values = {
            "return": [episode.episode_return for episode in self.episodes],
            "length": [float(episode.length) for episode in self.episodes],
        }
        for name, numbers in values.items():
            found[f"mean_{name}"] = float(np.mean(numbers))
            found[f"std_{name}"] = float(np.std(numbers))
            found[f"min_{name}"] = float(np.min(numbers))
            found[f"max_{name}"] = float(np.max(numbers))
        return found


class _Lane:
    """One env and the episodes it still owes."""

    def __init__(self, create_env_fn: EnvFactory, quota: int, seed: int) -> None:
        self.env = gymnasium_env(make_env(create_env_fn))
        self.quota = quota
        self.observation, _ = self.env.reset(seed=seed)
        self.episode_return, self.length = 0.0, 0

    def step(self, action: Any) -> Episode | None:
        """Step; the episode, if it ended."""
        self.observation, reward, terminated, truncated, _ = self.env.step(action)
        self.episode_return += float(reward)
        self.length += 1
        if not (terminated or truncated):
            return None
        episode = Episode(self.episode_return, self.length)
        self.episode_return, self.length = 0.0, 0
        self.quota -= 1
        if self.quota:
            self.observation, _ = self.env.reset()
        return episode


@torch.no_grad()
def evaluate_policy(
    policy: nn.Module,
    create_env_fn: EnvFactory,
    num_episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    num_envs: int = 16,
) -> EvaluationResult:
    """Run whole episodes in this process, several envs a forward pass.

    Every env owes the same number of episodes, so that short ones are not counted more often.

    Args:
        policy: TensorDict module that reads observations and writes ``action``.
        create_env_fn: as for :class:`~sf_torchrl.SharedMemoryCollector`.
        num_episodes: how many.
        deterministic: take the mode of the policy's distribution instead of a sample.
        seed: of envs and sampling; the global random state is left as it was.
        num_envs: envs a forward pass.

    Raises:
        ValueError: ``num_episodes`` is not positive.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes={num_episodes} must be at least 1")
    num_envs = min(num_envs, num_episodes)
    quotas = [num_episodes // num_envs + (i < num_episodes % num_envs) for i in range(num_envs)]
    seeds = np.random.SeedSequence(seed).generate_state(num_envs) >> 1
    lanes = [
        _Lane(create_env_fn, quota, int(env_seed))
        for quota, env_seed in zip(quotas, seeds, strict=True)
    ]
    env = lanes[0].env
    specs = read_specs(env.observation_space, env.action_space, env_name(create_env_fn))
    to_env = specs.action.adapter()
    mode = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
    episodes: list[Episode] = []
    was_training = policy.training
    policy.eval()
    try:
        with torch.random.fork_rng(devices=[]), set_interaction_type(mode):
            torch.manual_seed(seed)
            while active := [lane for lane in lanes if lane.quota]:
                answer = policy(_stack(active, specs))
                actions = to_env(answer.get("action").numpy())
                ended = [lane.step(a) for lane, a in zip(active, actions, strict=True)]
                episodes += [episode for episode in ended if episode is not None]
    finally:
        policy.train(was_training)
        for lane in lanes:
            lane.env.close()
    return EvaluationResult(tuple(episodes))


def _stack(lanes: Sequence[_Lane], specs: EnvSpecs) -> TensorDict:
    found = TensorDict({}, batch_size=[len(lanes)])
    for feature in specs.observation:
        rows = [
            pick(lane.observation, feature.key) if specs.is_dict else lane.observation
            for lane in lanes
        ]
        found.set(feature.key, torch.from_numpy(np.stack(rows).astype(feature.dtype, copy=False)))
    return found
