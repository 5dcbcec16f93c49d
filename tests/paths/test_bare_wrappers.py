"""A TorchRL wrapper is taken off only where the batch is the same without it."""

from functools import partial
from itertools import islice

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformAction, TransformObservation
from seeded import cartpole, pendulum
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    RewardSum,
    StepCounter,
    TransformedEnv,
)

STEPS = 60


def leaves(tensordict):
    return dict(tensordict.items(include_nested=True, leaves_only=True))


def first_action(env):
    """A policy that writes the same action always, of any action space."""
    one = env.full_action_spec.zero()
    for key, spec in env.full_action_spec.items(True, True):
        zeros = np.zeros(spec.to_numpy(spec.rand()).shape, spec.to_numpy(spec.rand()).dtype)
        one.set(key, spec.encode(zeros))

    def act(tensordict):
        return tensordict.update(one.expand(*tensordict.batch_size, *one.batch_size))

    return act


def torchrls(make, base, policy):
    """What TorchRL's own Collector gives of the wrapper, with the three counters."""
    env = TransformedEnv(make(base), Compose(InitTracker(), StepCounter(), RewardSum()))
    collector = Collector(env, policy, frames_per_batch=STEPS, total_frames=STEPS)
    (batch,) = list(collector)
    collector.shutdown()
    return batch


def one_env(make_collector, make, policy=None):
    return make_collector(
        make, policy, num_envs_per_worker=1, rollout_length=STEPS, frames_per_batch=STEPS
    )


def assert_is_torchrls(make_collector, make):
    """Every leaf, without any tolerance."""
    policy = first_action(make())
    collector = one_env(make_collector, make, policy)
    ((found,),) = islice(collector, 1)
    (base,) = collector._engine._parts.env_seeds(0)
    found, expected = leaves(found), leaves(torchrls(make, base, policy))
    del found["policy_version"]
    ids, expected_ids = (x.pop(("collector", "traj_ids")).diff() for x in (found, expected))
    assert torch.equal(ids == 0, expected_ids == 0)
    assert (ids != 0).any()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert found[key].shape == value.shape, key
        assert torch.equal(found[key], value), key


# -- observations --------------------------------------------------------------------------------


def observing(space, function, base=0):
    return GymWrapper(TransformObservation(cartpole(base), function, space))


FOUR, ONE = (spaces.Box(-np.inf, np.inf, shape, np.float32) for shape in ((4,), ()))
OBSERVED = {
    # TorchRL calls it "observation".
    "a state": (spaces.Dict(state=FOUR), lambda x: {"state": x}),
    "a state and an observation": (
        spaces.Dict(state=FOUR, observation=FOUR),
        lambda x: {"state": x, "observation": 2 * x},
    ),
    "a Dict of its own": (
        spaces.Dict(pole=FOUR, cart=spaces.Dict(speed=FOUR)),
        lambda x: {"pole": x, "cart": {"speed": -x}},
    ),
    "one number": (ONE, lambda x: x[1]),
    "one number in a Dict": (
        spaces.Dict(pole=FOUR, cart=spaces.Dict(speed=ONE)),
        lambda x: {"pole": x, "cart": {"speed": x[1]}},
    ),
    "bools": (spaces.Box(0, 1, (4,), np.bool_), lambda x: x > 0),
    "bits": (spaces.MultiBinary(4), lambda x: (x > 0).astype(np.int8)),
    "a class": (spaces.Discrete(3), lambda x: int(x[0] > 0) + int(x[2] > 0)),
    "an integer array": (spaces.Box(-99, 99, (4,), np.int16), lambda x: (9 * x).astype(np.int16)),
    "a picture": (
        spaces.Box(0, 255, (4, 1, 3), np.uint8),
        lambda x: np.broadcast_to((99 + 9 * x).astype(np.uint8)[:, None, None], (4, 1, 3)),
    ),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_what_is_observed_is_what_torchrl_makes_of_it(make_collector, name):
    assert_is_torchrls(make_collector, partial(observing, *OBSERVED[name]))


# -- actions -------------------------------------------------------------------------------------


class Anything(gymnasium.ActionWrapper):
    """CartPole pushed to the left whatever is done."""

    def __init__(self, env, space):
        super().__init__(env)
        self.action_space = space

    def action(self, action):
        assert self.action_space.contains(np.asarray(action, self.action_space.dtype)), action
        return 0


ACTION_SPACES = {
    "two choices": spaces.MultiDiscrete([2, 3]),
    "bits": spaces.MultiBinary(3),
    "numbers in double precision": spaces.Box(-1, 1, (2,), np.float64),
    "whole numbers": spaces.Box(0, 5, (2,), np.int64),
}


def acting(space, base=0):
    return GymWrapper(Anything(cartpole(base), space))


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_what_is_done_is_what_torchrl_makes_of_it(make_collector, name):
    assert_is_torchrls(make_collector, partial(acting, ACTION_SPACES[name]))


def narrowed():
    env = GymWrapper(pendulum())
    env.action_spec = Bounded(-0.25, 0.25, (1,))
    return env


def test_an_action_spec_that_was_narrowed_holds(make_collector):
    ((found,),) = islice(one_env(make_collector, narrowed), 1)
    assert found["action"].abs().max() <= 0.25


def test_a_wrapped_env_that_takes_tensors_gets_tensors(make_collector):
    def refuse_arrays(action):
        assert isinstance(action, torch.Tensor), action
        return action.numpy()

    def make():
        env = TransformAction(pendulum(), refuse_arrays, pendulum().action_space)
        return GymWrapper(env, convert_actions_to_numpy=False)

    ((found,),) = islice(one_env(make_collector, make), 1)
    assert found["next", "observation"].abs().sum() > 0


# -- specs that the user replaced ----------------------------------------------------------------


def in_double(env):
    env.observation_spec = Composite(observation=Unbounded((4,), dtype=torch.float64))


def renamed(env):
    env.observation_spec = Composite(seen=Unbounded((4,)))


@pytest.mark.parametrize("replace", [in_double, renamed])
def test_a_spec_that_was_replaced_is_what_torchrl_makes_of_it(make_collector, replace):
    def make(base=0):
        env = GymWrapper(cartpole(base), categorical_action_encoding=True)
        replace(env)
        return env

    assert_is_torchrls(make_collector, make)


def test_a_reward_spec_that_was_replaced_holds(make_collector):
    def make():
        env = GymWrapper(cartpole(), categorical_action_encoding=True)
        env.reward_spec = Unbounded((1,), dtype=torch.float64)
        return env

    ((found,),) = islice(one_env(make_collector, make), 1)
    assert found["next", "reward"].dtype == torch.float64


# -- and where nothing differs -------------------------------------------------------------------

SAME = {
    "numbers": FOUR,
    "numbers in double precision": spaces.Box(-np.inf, np.inf, (4,), np.float64),
    "a Dict": spaces.Dict(pole=FOUR, cart=spaces.Dict(speed=FOUR)),
    "a state beside another": spaces.Dict(state=FOUR, observation=FOUR),
}


@pytest.mark.parametrize("encode", [True, False])
@pytest.mark.parametrize("name", SAME)
def test_a_wrapper_that_changes_nothing_is_taken_off(make_collector, name, encode):
    space = SAME[name]

    def make():
        env = TransformObservation(cartpole(), lambda _: space.sample(), space)
        return GymWrapper(env, categorical_action_encoding=encode)

    assert make_collector(make).stats()["path"] == "raw"


@pytest.mark.parametrize("make", [pendulum, cartpole])
def test_the_wrapper_of_an_env_is_taken_off(make_collector, make):
    assert make_collector(lambda: GymWrapper(make())).stats()["path"] == "raw"
