"""What may be given as create_env_fn, which path it takes, and what is refused before a start."""

from functools import partial

import envs
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from seeded import cartpole
from torchrl.envs import EnvCreator, GymEnv, GymWrapper, SerialEnv, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import (
    ContinuousActionVecMockEnv,
    CountingBatchedEnv,
    CountingEnv,
    HeterogeneousCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from sf_torchrl import ActorCritic, SharedMemoryCollector

SMALL = {"rollout_length": 5, "frames_per_batch": 60}


def same_step(count, make=cartpole):
    return SyncVectorEnv([make] * count, autoreset_mode=AutoresetMode.SAME_STEP)


def ones_of(make):
    """A policy that writes ones for every action key of a TorchRL env."""
    spec = make().full_action_spec

    def act(td):
        return td.update(spec.expand(*td.batch_size, *spec.shape).one())

    return act


class WithReader(GymEnv):
    """A GymEnv of one's own: nobody knows what it changes."""


def reading_infos():
    env = GymEnv("CartPole-v1")
    env.set_info_dict_reader(lambda info, tensordict: tensordict)
    return env


PATHS = [
    ("CartPole-v1", "raw"),
    ("seeded:cartpole", "raw"),
    (cartpole, "raw"),
    (lambda: GymEnv("CartPole-v1"), "raw"),
    (lambda: GymWrapper(cartpole()), "raw"),
    (EnvCreator(lambda: GymEnv("CartPole-v1")), "raw"),
    (lambda: GymEnv("CartPole-v1", frame_skip=2), "generic"),
    (reading_infos, "generic"),
    (lambda: WithReader("CartPole-v1"), "generic"),
    (lambda: GymEnv("FrozenLake-v1"), "generic"),  # its observation is a Discrete
    (lambda: TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=4)), "generic"),
    (partial(CountingEnv, max_steps=4), "generic"),
    (partial(same_step, 2), "vectorized"),
    (lambda: SerialEnv(2, lambda: GymEnv("CartPole-v1")), "vectorized"),
    (
        lambda: CountingBatchedEnv(max_steps=torch.tensor([4, 6]), batch_size=(2,)),
        "vectorized",
    ),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("create_env_fn", "path"), PATHS)
def test_what_is_made_decides_the_path(make_collector, create_env_fn, path):
    collector = make_collector(create_env_fn, num_envs_per_worker=None, **SMALL)
    batch = next(iter(collector))
    assert collector.stats()["path"] == path
    assert batch.batch_size == (12, 5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        partial(CountingEnv, max_steps=4),
        partial(NestedCountingEnv, max_steps=4),
        partial(MultiKeyCountingEnv, max_steps=4),
        ContinuousActionVecMockEnv,
    ],
)
def test_every_key_of_a_torchrl_env_is_in_the_batch(make_collector, make):
    env = make()
    batch = next(iter(make_collector(make, num_envs_per_worker=1, num_splits=1, **SMALL)))
    flat = batch.reshape(-1)
    expected = env.rand_step(env.reset())
    for key, value in expected.items(include_nested=True, leaves_only=True):
        if str(key[-1] if isinstance(key, tuple) else key).startswith("_"):
            continue
        assert flat.get(key).shape == (60, *value.shape), key
        assert flat.get(key).dtype == value.dtype, key


@pytest.mark.parametrize("max_steps", [3, 8])
def test_a_nested_env_ends_resets_and_counts_trajectories(make_collector, max_steps):
    make = partial(NestedCountingEnv, max_steps=max_steps)
    collector = make_collector(make, ones_of(make), num_envs_per_worker=1, **SMALL)
    flat = next(iter(collector)).reshape(-1)
    ids = flat["collector", "traj_ids"]
    done = flat["next", "data", "done"].flatten(1).any(-1)
    assert (ids.diff() != 0).tolist() == done[:-1].tolist()
    assert done.sum() == 60 // (max_steps + 1)


# -- several envs at once ------------------------------------------------------------------------


def test_sizes_that_vector_envs_do_not_fit_into_are_refused():
    with pytest.raises(ValueError, match=r"steps 4 envs at once: num_envs_per_worker=6 .*e\.g\. 8"):
        SharedMemoryCollector(partial(same_step, 4), num_envs_per_worker=6, frames_per_batch=1024)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=2),
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"),
        lambda: SyncVectorEnv([cartpole] * 2),
    ],
)
def test_autoreset_in_the_next_step_is_refused(make):
    with pytest.raises(ValueError, match="NEXT_STEP, whose steps after an episode's end are no"):
        SharedMemoryCollector(make, frames_per_batch=1024)


def envpool_cartpole(**kwargs):
    envpool = pytest.importorskip("envpool")
    options = {"num_envs": 3, "max_episode_steps": 12, **kwargs}
    return envpool.make("CartPole-v1", env_type="gymnasium", **options)


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
def test_envpool_loses_no_step_and_no_final_observation(make_collector):
    pytest.importorskip("envpool")
    collector = make_collector(
        envpool_cartpole, num_envs_per_worker=None, rollout_length=20, frames_per_batch=600
    )
    batch = next(iter(collector))
    assert collector.stats()["path"] == "vectorized"
    for lane in (batch[i::3].reshape(-1) for i in range(3)):
        done = lane["next", "done"][:, 0]
        assert done.sum() > 10
        following = lane["next", "observation"][:-1]
        assert (following == lane["observation"][1:])[~done[:-1]].all()
        assert (lane["next", "reward"] == 1).all()  # a reset that took a step would earn nothing
        started = lane["observation"][1:][done[:-1]]
        assert (started.abs() <= 0.05).all()
        assert lane["step_count"].max() == 11


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
@pytest.mark.multiprocess
def test_envpools_of_several_workers_differ(make_collector):
    pytest.importorskip("envpool")
    collector = make_collector(
        envpool_cartpole,
        num_workers=2,
        num_envs_per_worker=3,
        frames_per_batch=30,
        async_mode=False,
    )
    batch = next(iter(collector))
    first = batch["observation"][batch["is_init"][..., 0]]
    assert len(first.unique(dim=0)) == len(first)


def test_an_envpool_that_steps_a_part_of_its_envs_is_refused():
    pytest.importorskip("envpool")
    with pytest.raises(ValueError, match="batch_size 2 and num_envs 3"):
        SharedMemoryCollector(partial(envpool_cartpole, batch_size=2), frames_per_batch=1024)


# -- functions, lists and arguments --------------------------------------------------------------


@pytest.mark.multiprocess
def test_a_list_has_a_function_for_each_worker(make_collector):
    collector = make_collector(
        [partial(envs.CountingEnv, length=3), partial(envs.CountingEnv, length=5)],
        num_workers=None,
        num_envs_per_worker=1,
        frames_per_batch=200,
        async_mode=False,
    )
    batch = next(iter(collector))
    assert collector.config.num_workers == 2
    lengths = {
        worker: batch["step_count"][(batch["collector", "traj_ids"] % 2 == worker)].max().item()
        for worker in (0, 1)
    }
    assert lengths == {0: 2, 1: 4}


def test_a_list_of_another_length_is_refused():
    with pytest.raises(ValueError, match="2 functions for num_workers=3"):
        SharedMemoryCollector([cartpole] * 2, num_workers=3, frames_per_batch=1024)


def test_envs_that_differ_between_workers_are_refused(family):
    makers = ["CartPole-v1", "Pendulum-v1"]
    with pytest.raises(ValueError, match=r"'CartPole-v1' observes .*\[4\].*'Pendulum-v1'.*\[3\]"):
        SharedMemoryCollector(makers, frames_per_batch=1024)
    assert family.members() == {}


def test_an_env_in_place_of_a_function_is_refused():
    for env in (cartpole(), GymEnv("CartPole-v1"), same_step(2)):
        with pytest.raises(ValueError, match="give a function that makes one"):
            SharedMemoryCollector(env, frames_per_batch=1024)


@pytest.mark.parametrize(
    "create_env_fn", [lambda render_mode: gymnasium.make("CartPole-v1"), "CartPole-v1"]
)
def test_arguments_for_the_function_are_passed_on(make_collector, create_env_fn):
    kwargs = {"render_mode": "rgb_array"}
    collector = make_collector(create_env_fn, create_env_kwargs=kwargs)
    assert next(iter(collector)).batch_size == (4, 5)


def test_arguments_may_differ_between_workers():
    with pytest.raises(ValueError, match="1 entries for num_workers=2"):
        SharedMemoryCollector(
            cartpole, create_env_kwargs=[{"limit": 3}], num_workers=2, frames_per_batch=1024
        )


def test_max_frames_per_traj_of_a_vector_env_is_refused():
    with pytest.raises(ValueError, match=r"max_frames_per_traj=6 .*TimeLimit around each"):
        SharedMemoryCollector(partial(same_step, 2), max_frames_per_traj=6, frames_per_batch=1024)


def test_what_shared_memory_cannot_hold_is_refused():
    for make in (partial(HeterogeneousCountingEnv, max_steps=4), lambda: GymEnv("Blackjack-v1")):
        with pytest.raises(ValueError, match="arrays of numbers with a fixed shape"):
            SharedMemoryCollector(make, frames_per_batch=1024)


# -- what is counted -----------------------------------------------------------------------------


class Chirping(gymnasium.ObservationWrapper):
    """Has the worker's key itself."""

    def __init__(self):
        super().__init__(cartpole())
        self.observation_space = gymnasium.spaces.Dict(
            {
                "observation": self.env.observation_space,
                "step_count": gymnasium.spaces.Box(0, 9, (2,), np.float32),
            }
        )

    def observation(self, observation):
        return {"observation": observation, "step_count": np.full(2, 7, np.float32)}


def test_a_key_of_the_envs_own_goes_before_the_workers(make_collector):
    batch = next(iter(make_collector(Chirping)))
    assert (batch["step_count"] == 7).all()
    assert batch["is_init"].dtype == torch.bool


def test_a_network_does_not_look_at_what_is_counted():
    policy = ActorCritic.for_env(partial(TransformedEnv, GymEnv("CartPole-v1"), StepCounter(5)))
    assert policy.in_keys == ["observation"]


class Closable(gymnasium.Wrapper):
    """Cannot be reset once it has been closed."""

    is_closed = False

    def reset(self, **kwargs):
        assert not self.is_closed, "reset after close"
        return super().reset(**kwargs)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize(
    "make",
    [
        lambda: GymWrapper(Closable(cartpole())),
        lambda: TransformedEnv(GymWrapper(Closable(cartpole())), StepCounter()),
    ],
)
def test_an_env_taken_out_of_its_wrapper_is_not_closed_with_it(make_collector, make):
    """TorchRL's envs close what is in them when they are forgotten."""
    collector = make_collector(make, **SMALL)
    batch = next(iter(collector))
    assert collector.stats()["path"] == "raw"
    assert batch["is_init"].sum() > 2
