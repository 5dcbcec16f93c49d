"""A reward is a number, or whatever holds one, wherever gymnasium envs are stepped."""

from functools import partial
from itertools import islice

import gymnasium
import numpy as np
import pytest
import torch
from endings import transformed, wrapped
from envs import CountingEnv
from gymnasium.wrappers import TransformReward
from policies import TellingPolicy

from sf_torchrl import SharedMemoryCollector
from sf_torchrl.evaluation import evaluate_policy
from sf_torchrl.sampler import DefaultWorker

LENGTH = 3
HOLDERS = {
    "a float": float,
    "an int": int,
    "a NumPy number": np.float64,
    "an array without axes": lambda x: np.array(x),
    "an array of one axis": lambda x: np.array([x]),
    "an array of three axes": lambda x: np.array([[[x]]], np.float32),
    "a tensor without axes": lambda x: torch.tensor(x),
    "a tensor of one axis": lambda x: torch.tensor([x]),
    "a tensor with a gradient": lambda x: torch.tensor([float(x)], requires_grad=True),
    "a list": lambda x: [x],
    "now this, now that": lambda x: x if x < 20 else np.array([x]),
}


class Reused(gymnasium.Wrapper):
    """Earns the same array each time, overwritten by the reset as well."""

    def __init__(self, env):
        super().__init__(env)
        self._earned = np.zeros(1)

    def reset(self, **kwargs):
        self._earned[:] = -1
        return self.env.reset(**kwargs)

    def step(self, action):
        observation, reward, *rest = self.env.step(action)
        self._earned[:] = reward
        return observation, self._earned, *rest


def earning(hold):
    """Earns 0, 10, 20 and one more for each action 1."""
    return TransformReward(CountingEnv(length=LENGTH, ends="truncated"), hold)


def reusing():
    return Reused(CountingEnv(length=LENGTH, ends="truncated"))


MAKERS = {name: partial(earning, hold) for name, hold in HOLDERS.items()}
MAKERS["an array that is used again"] = reusing


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("name", MAKERS)
def test_what_holds_one_number_is_earned_as_that_number(make_collector, name, num_envs):
    collector = make_collector(
        MAKERS[name],
        num_envs_per_worker=num_envs,
        rollout_length=8,
        frames_per_batch=8 * num_envs,
    )
    (batch,) = islice(collector, 1)
    earned = 10 * batch["observation"][..., 2] + batch["action"]
    assert torch.equal(batch["next", "reward"][..., 0], earned.float())
    done = batch["next", "done"][..., 0]
    returns = batch["next", "episode_reward"][..., 0][done]
    assert torch.equal(returns, torch.cat([row[:6].view(2, 3).sum(1) for row in earned]).float())


@pytest.mark.parametrize("change", [wrapped, transformed])
@pytest.mark.parametrize("name", ["an array of one axis", "an array without axes"])
def test_inside_torchrls_wrapper_too(make_collector, change, name):
    (batch,) = islice(make_collector(partial(change, MAKERS[name])), 1)
    earned = 10 * batch["observation"][..., 2] + batch["action"]
    assert torch.equal(batch["next", "reward"][..., 0], earned.float())


@pytest.mark.parametrize("name", MAKERS)
def test_an_evaluation_earns_it(name):
    policy = TellingPolicy().become(1)
    found = evaluate_policy(policy, MAKERS[name], 2, num_envs=1)
    assert [episode.episode_return for episode in found.episodes] == [33, 33]


class Ones:
    def get_action(self, observation):
        return 1, {}


@pytest.mark.parametrize("name", MAKERS)
def test_a_samplers_worker_earns_it(name):
    worker = DefaultWorker(seed=0, max_episode_length=9, worker_number=0)
    worker.update_agent(Ones())
    worker.update_env(MAKERS[name]())
    assert worker.rollout().rewards.tolist() == [1, 11, 21]


@pytest.mark.parametrize("value", [None, np.zeros(2), [], "much", torch.zeros(2)])
def test_what_is_no_number_is_refused_at_once(value):
    with pytest.raises(ValueError, match=r"env .*reward .* is not a number"):
        SharedMemoryCollector(partial(earning, lambda _: value), frames_per_batch=1024)
