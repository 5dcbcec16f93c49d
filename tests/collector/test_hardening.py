"""What once went wrong, each with its whole kind."""

import gc
import os
import threading
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from envs import CountingEnv, FaultyEnv, StuckInCloseEnv
from gymnasium import spaces
from policies import TellingPolicy
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from sf_torchrl import ActorCritic, SharedMemoryCollector
from sf_torchrl.workers.supervisor import WorkerError

pytestmark = [pytest.mark.timeout(40)]


def num_descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("async_mode", [True, False])
def test_one_env_of_many_that_hangs_at_its_start_ends_the_run(
    make_collector, family, tmp_path, async_mode
):
    env = partial(
        FaultyEnv, "hang", where="constructor", spared=os.getpid(), only_first=str(tmp_path / "one")
    )
    collector = make_collector(
        env,
        num_workers=2,
        num_envs_per_worker=1,
        frames_per_batch=10,
        async_mode=async_mode,
        env_start_timeout_s=3.0,
    )
    with pytest.raises(WorkerError, match=r"env_start_timeout_s=3\.0: env '.*' hangs"):
        for _ in collector:
            pass
    assert family.left_after(5) == {}  # nobody has called shutdown


class KeyedEnv(CountingEnv):
    """A Dict observation with one key."""

    def __init__(self, key):
        super().__init__()
        self.key = key
        self.observation_space = spaces.Dict({key: self.observation_space})

    def _observe(self, action):
        return {self.key: super()._observe(action)}


def test_a_dict_whose_first_key_is_observation(make_collector):
    (batch,) = islice(make_collector(partial(KeyedEnv, "observation")), 1)
    assert batch["observation"].shape == (4, 5, 4)


@pytest.mark.parametrize(
    "key",
    ["reward", "action", "done", "terminated", "truncated", "policy_version", "next", "collector"],
)
def test_a_dict_key_that_a_batch_has_itself_is_refused(make_collector, key):
    with pytest.raises(ValueError, match=key):
        make_collector(partial(KeyedEnv, key))


def test_an_env_that_cannot_be_sent_leaves_no_process(family):
    lock = threading.Lock()

    def env():
        return CountingEnv() if lock else None

    with pytest.raises(Exception, match="pickle") as caught:
        next(iter(SharedMemoryCollector(env, frames_per_batch=1024, num_workers=2)))
    assert family.left_after(0) == {}
    assert isinstance(caught.value, ValueError)


def test_synchronous_collection_has_no_lag_even_if_it_was_started_early(make_collector):
    policy = TellingPolicy()
    collector = make_collector(CountingEnv, policy, num_workers=1, async_mode=False)
    collector.start()
    assert not collector.is_running()  # in the background: there is no buffer
    collector.update_policy_weights_(policy.become(1))
    (batch,) = islice(collector, 1)
    assert (batch["policy_version"] == collector.policy_version).all()


def test_weights_published_again_under_the_same_version_reach_the_actions(make_collector):
    collector = make_collector(CountingEnv, TellingPolicy())
    next(iter(collector))
    collector.weight_store.publish(TellingPolicy().become(1), version=0)
    assert (next(iter(collector))["action"] == 1).all()


def test_a_collector_that_is_forgotten_holds_no_descriptor():
    before = num_descriptors()
    collector = SharedMemoryCollector(CountingEnv, num_workers=0, frames_per_batch=1024)
    next(iter(collector))
    del collector
    assert num_descriptors() == before


def test_a_collector_that_was_never_started_holds_no_descriptor_once_shut_down():
    before = num_descriptors()
    collector = SharedMemoryCollector(CountingEnv, num_workers=0, frames_per_batch=1024)
    collector.shutdown()
    del collector
    assert num_descriptors() == before


class WithAuxiliaryHead(ActorCritic):
    def __init__(self, *args):
        super().__init__(*args)
        self.auxiliary = nn.Linear(3, 2)


class Greedy(ActorCritic):
    def forward(self, tensordict):
        super().forward(tensordict)
        return tensordict.set("action", torch.ones_like(tensordict["action"]))


def test_an_actor_critic_with_more_weights_is_a_policy(make_collector):
    policy = WithAuxiliaryHead.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    batch = next(iter(make_collector("CartPole-v1", policy)))
    assert batch["action"].shape == (4, 5)


def test_an_actor_critic_that_acts_otherwise_does_so_while_collecting(make_collector):
    policy = Greedy.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    assert (next(iter(make_collector("CartPole-v1", policy)))["action"] == 1).all()


def test_weights_given_by_model_name_are_published(make_collector):
    collector = make_collector(CountingEnv, TellingPolicy(), async_mode=False)
    weights = TensorDict.from_module(TellingPolicy().become(1))
    collector.update_policy_weights_(weights_dict={"policy": weights})
    assert (next(iter(collector))["told"] == 1).all()


def test_a_policy_output_that_numpy_lacks_is_refused_at_once(make_collector):
    def act(observation):
        return observation[..., 0] % 2, observation.bfloat16()

    policy = TensorDictModule(act, in_keys=["observation"], out_keys=["action", "hidden"])
    with pytest.raises(ValueError, match="bfloat16"):
        make_collector(CountingEnv, policy)


def test_a_policy_that_raises_on_the_envs_observations_is_refused(make_collector):
    policy = TensorDictModule(nn.Linear(7, 2), in_keys=["observation"], out_keys=["action"])
    with pytest.raises(ValueError, match="policy"):
        make_collector("CartPole-v1", policy)


class Double(CountingEnv):
    def __init__(self):
        super().__init__()
        self.action_space = spaces.Box(np.float32([-1, -1]), np.float32([1, 1]))

    def step(self, action):
        assert self.action_space.contains(action), action.dtype
        return self._observe(0), 0.0, False, False, {}


def test_a_policy_in_double_precision_gives_the_env_actions_of_its_space(make_collector):
    policy = TensorDictModule(
        lambda observation: torch.zeros(*observation.shape[:-1], 2, dtype=torch.float64),
        in_keys=["observation"],
        out_keys=["action"],
    )
    batch = next(iter(make_collector(Double, policy)))
    assert batch["action"].dtype is torch.float64  # the batch has what the policy said


@pytest.mark.multiprocess
def test_an_env_that_fails_and_then_hangs_in_close_is_reported(make_collector):
    make = partial(StuckInCloseEnv, "raise", at=3, spared=os.getpid())
    collector = make_collector(make, num_workers=1)
    with pytest.raises(WorkerError, match="the simulator is on fire"):
        next(iter(collector))
