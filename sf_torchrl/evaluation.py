"""Evaluation: episodes of a policy, without learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDict, unravel_key
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor, nn

from sf_torchrl.envs.factory import EnvFactory, env_name, gymnasium_env, make_env
from sf_torchrl.envs.spaces import EnvSpecs, number, pick, read_specs
from sf_torchrl.memory.batch import Episode
from sf_torchrl.memory.slab import Feature, Key
from sf_torchrl.models.given_policy import zeros
from sf_torchrl.models.policy_io import read_policy_io

Watcher = Callable[[gymnasium.Env[Any, Any]], None]


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
    """One env, the episodes it still owes, and what the policy remembers of it."""

    def __init__(self, create_env_fn: EnvFactory, quota: int, seed: int, watch: Watcher) -> None:
        self.env = gymnasium_env(make_env(create_env_fn))
        self.quota = quota
        self._watch = watch
        self._begin(seed)

    def _begin(self, seed: int | None = None) -> None:
        self.observation, _ = self.env.reset(seed=seed)
        self.episode_return, self.length = 0.0, 0
        self.state: dict[Key, Tensor] = {}  # zeros
        self._watch(self.env)

    def step(self, action: Any) -> Episode | None:
        """Step; the episode, if it ended."""
        self.observation, reward, terminated, truncated, _ = self.env.step(action)
        self.episode_return += number(reward)
        self.length += 1
        self._watch(self.env)
        if not (terminated or truncated):
            return None
        episode = Episode(self.episode_return, self.length)
        self.quota -= 1
        if self.quota:
            self._begin()
        return episode


class _Actor:
    """The policy on some lanes at once: its observations, and the state it carries."""

    def __init__(self, policy: nn.Module, specs: EnvSpecs) -> None:
        self._policy, self._specs = policy, specs
        io = read_policy_io(policy, specs)
        self._state = (*io.state, *io.core_state)
        self._written = (*io.state_outputs, *(("next", *f.key) for f in io.core_state))

    def act(self, lanes: Sequence[_Lane]) -> Any:
        """``[lanes, ...]`` actions as the policy gives them."""
        found = TensorDict({}, batch_size=[len(lanes)])
        for feature in self._specs.observation:
            found.set(feature.key, torch.from_numpy(self._observed(lanes, feature)))
        for feature in self._state:
            nothing = zeros(feature, 1)[0]
            found.set(
                feature.key, torch.stack([lane.state.get(feature.key, nothing) for lane in lanes])
            )
        counted = {  # as env workers count them
            "is_init": torch.tensor([[lane.length == 0] for lane in lanes]),
            "step_count": torch.tensor([[lane.length] for lane in lanes]),
            "episode_reward": torch.tensor([[lane.episode_return] for lane in lanes]),
        }
        for tracked in self._specs.tracked:
            found.set(tracked.key, counted[tracked.key[0]])
        answer = self._policy(found)
        for feature, key in zip(self._state, self._written, strict=True):
            for lane, state in zip(lanes, answer.get(unravel_key(key)), strict=True):
                lane.state[feature.key] = state
        return answer.get("action").numpy()

    def _observed(self, lanes: Sequence[_Lane], feature: Feature) -> np.ndarray[Any, Any]:
        rows = [
            pick(lane.observation, feature.key) if self._specs.is_dict else lane.observation
            for lane in lanes
        ]
        return np.stack(rows).astype(feature.dtype, copy=False)


def _nothing(_: gymnasium.Env[Any, Any]) -> None:
    pass


@torch.no_grad()
def evaluate_policy(
    policy: nn.Module,
    create_env_fn: EnvFactory,
    num_episodes: int,
    *,
    deterministic: bool = True,
    seed: int = 0,
    num_envs: int = 16,
    watch: Watcher = _nothing,
) -> EvaluationResult:
    """Run whole episodes in this process, several envs a forward pass.

    Every env owes the same number of episodes, so that short ones are not counted more often.
    Recurrent policies begin each episode with a state of zeros.

    Args:
        policy: TensorDict module that reads observations and writes ``action``.
        create_env_fn: as for :class:`~sf_torchrl.SharedMemoryCollector`.
        num_episodes: how many.
        deterministic: take the mode of the policy's distribution instead of a sample.
        seed: of envs and sampling; the global random state is left as it was.
        num_envs: envs a forward pass.
        watch: called with the env after each reset and step.

    Raises:
        ValueError: ``num_episodes`` is not positive, or the policy does not fit the env.
    """
    if num_episodes < 1:
        raise ValueError(f"num_episodes={num_episodes} must be at least 1")
    if num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1")
    num_envs = min(num_envs, num_episodes)
    quotas = [num_episodes // num_envs + (i < num_episodes % num_envs) for i in range(num_envs)]
    seeds = np.random.SeedSequence(seed).generate_state(num_envs) >> 1
    lanes: list[_Lane] = []
    was_training = policy.training
    policy.eval()
    try:
        for quota, env_seed in zip(quotas, seeds, strict=True):
            lanes.append(_Lane(create_env_fn, quota, int(env_seed), watch))
        env = lanes[0].env
        specs = read_specs(env.observation_space, env.action_space, env_name(create_env_fn))
        with (
            torch.random.fork_rng(devices=[]),
            set_interaction_type(
                InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
            ),
        ):
            torch.manual_seed(seed)
            return EvaluationResult(tuple(_run(_Actor(policy, specs), lanes, specs)))
    finally:
        policy.train(was_training)
        for lane in lanes:
            lane.env.close()


def _run(actor: _Actor, lanes: Sequence[_Lane], specs: EnvSpecs) -> list[Episode]:
    to_env = specs.action.adapter()
    episodes: list[Episode] = []
    while active := [lane for lane in lanes if lane.quota]:
        actions = to_env(actor.act(active))
        ended = [lane.step(action) for lane, action in zip(active, actions, strict=True)]
        episodes += [episode for episode in ended if episode is not None]
    return episodes
