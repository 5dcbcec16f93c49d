"""A TorchRL env is stepped the short way only where that gives what step_and_maybe_reset gives."""

import pytest
import torch
from torchrl.data import Unbounded
from torchrl.envs import (
    ActionDiscretizer,
    CatFrames,
    CatTensors,
    Compose,
    DoubleToFloat,
    ExcludeTransform,
    FlattenObservation,
    FrameSkipTransform,
    GymEnv,
    InitTracker,
    ObservationNorm,
    RenameTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SignTransform,
    StepCounter,
    TargetReturn,
    TensorDictPrimer,
    TimeMaxPool,
    Transform,
    TransformedEnv,
    UnsqueezeTransform,
)
from torchrl.testing.mocking_classes import (
    ContinuousActionVecMockEnv,
    CountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from sf_torchrl.envs.torchrl_env import without_counters
from sf_torchrl.workers.torchrl_stepper import Stepper

STEPS = 70


class Doubling(Transform):
    """Changes what the next step begins with, between two steps."""

    def _post_step_mdp_hooks(self, tensordict, tensordict_):
        tensordict_.set("observation", tensordict_.get("observation") * 2)
        return tensordict, tensordict_


class AddingTheAction(Transform):
    """Looks at the step's input."""

    def _step(self, tensordict, next_tensordict):
        observation = next_tensordict.get("observation") + tensordict.get("action")
        return next_tensordict.set("observation", observation)


class PushingHarder(Transform):
    """Changes the whole input on its way into the env."""

    def _inv_call(self, tensordict):
        return tensordict.set("action", 1 - tensordict.get("action"))


class OwnStepEnv(CountingEnv):
    """An env with a step of its own around ``_step``."""

    def step(self, tensordict):
        stepped = super().step(tensordict)
        stepped.get("next").set("reward", stepped.get(("next", "reward")) + 5)
        return stepped


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def pendulum():
    return GymEnv("Pendulum-v1")


NORM = {"loc": 0.5, "scale": 2.0, "in_keys": ["observation"]}
ZOO = {
    "no transform": cartpole,
    "stock": lambda: TransformedEnv(
        cartpole(), Compose(ObservationNorm(**NORM), RewardScaling(0.1, 3.0), StepCounter(9))
    ),
    "one transform, no Compose": lambda: TransformedEnv(cartpole(), StepCounter(7)),
    "counters first": lambda: TransformedEnv(
        cartpole(), Compose(InitTracker(), RewardSum(), StepCounter(), RewardScaling(0.0, 2.0))
    ),
    "frames": lambda: TransformedEnv(
        cartpole(),
        Compose(UnsqueezeTransform(-1, in_keys=["observation"]), CatFrames(3, -1, ["observation"])),
    ),
    "renamed": lambda: TransformedEnv(
        cartpole(), Compose(RenameTransform(["observation"], ["state"]), SignTransform(["state"]))
    ),
    "joined": lambda: TransformedEnv(
        cartpole(), CatTensors(["observation"], "joined", del_keys=False)
    ),
    "left out": lambda: TransformedEnv(
        cartpole(),
        Compose(
            CatTensors(["observation"], "all", del_keys=False), ExcludeTransform("observation")
        ),
    ),
    "frame skip": lambda: TransformedEnv(cartpole(), Compose(FrameSkipTransform(3))),
    "pooled": lambda: TransformedEnv(cartpole(), TimeMaxPool(["observation"], T=3)),
    "primed": lambda: TransformedEnv(
        cartpole(), Compose(InitTracker(), TensorDictPrimer(hidden=Unbounded((3,))))
    ),
    "target return": lambda: TransformedEnv(cartpole(), TargetReturn(10.0)),
    "flattened doubles": lambda: TransformedEnv(
        pendulum(),
        Compose(
            FlattenObservation(-1, -1, in_keys=["observation"]),
            DoubleToFloat(),
            RewardClipping(-1, 1),
        ),
    ),
    "discretized": lambda: TransformedEnv(pendulum(), ActionDiscretizer(5)),
    "hooks": lambda: TransformedEnv(cartpole(), Doubling()),
    "input read": lambda: TransformedEnv(cartpole(), Compose(AddingTheAction(), StepCounter(6))),
    "input changed": lambda: TransformedEnv(cartpole(), Compose(PushingHarder(), StepCounter(6))),
    "nested envs": lambda: TransformedEnv(
        TransformedEnv(cartpole(), Compose(PushingHarder())),
        RewardScaling(0.0, 2.0),
        auto_unwrap=False,
    ),
    "own step": lambda: OwnStepEnv(max_steps=4),
    "counting": lambda: CountingEnv(max_steps=4),
    "continuous": ContinuousActionVecMockEnv,
    "nested keys": lambda: NestedCountingEnv(max_steps=4),
    "many keys": lambda: MultiKeyCountingEnv(max_steps=4),
}


def leaves(tensordict):
    return dict(tensordict.items(include_nested=True, leaves_only=True))


def assert_same(found, expected, ignored=()):
    found, expected = leaves(found), leaves(expected)
    for key in expected.keys() - set(ignored):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, msg=str(key))


def actions_of(env):
    torch.manual_seed(1)
    return [env.full_action_spec.rand() for _ in range(STEPS)]


def trajectory(env, step):
    """What each step gave and what the next began with, from one seed and the same actions."""
    env.set_seed(0)
    actions = actions_of(env)
    torch.manual_seed(2)
    current = env.reset()
    for action in actions:
        current.update(action)
        after, current = step(current)
        yield after.clone(), current.clone()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_steps_and_resets_are_those_of_step_and_maybe_reset(name):
    ours, theirs = ZOO[name](), ZOO[name]()

    def official(current):
        stepped, following = theirs.step_and_maybe_reset(current)
        return stepped.get("next"), following

    observed = set(leaves(theirs.full_observation_spec.zero()))
    done = set(leaves(theirs.full_done_spec.zero()))
    for (after, following), (expected_after, expected_following) in zip(
        trajectory(ours, Stepper(ours).step), trajectory(theirs, official), strict=True
    ):
        assert_same(after, expected_after)
        begun = set(leaves(expected_following)) - observed - done
        assert_same(following, expected_following, ignored=begun)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("no transform", True),
        ("stock", True),
        ("frames", True),
        ("hooks", False),
        ("own step", False),
        ("nested keys", False),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_short_way_is_taken_where_nothing_stands_against_it(name, short):
    env = ZOO[name]()
    stepper = Stepper(env)
    for _ in trajectory(env, stepper.step):
        pass
    assert stepper._may_skip is short


@pytest.mark.parametrize(
    ("transforms", "left"),
    [
        ([InitTracker, StepCounter, RewardSum], []),
        ([RewardSum], []),
        ([lambda: RewardScaling(0.0, 2.0), StepCounter, InitTracker], [RewardScaling]),
        ([RewardSum, lambda: RewardScaling(0.0, 2.0)], [RewardSum, RewardScaling]),
        ([lambda: StepCounter(max_steps=5)], [StepCounter]),
        ([lambda: StepCounter(step_count_key="age")], [StepCounter]),
        ([lambda: InitTracker("begun")], [InitTracker]),
        ([lambda: RewardSum(["reward"], ["total"])], [RewardSum]),
        ([lambda: RewardSum(reset_keys=["_reset"])], [RewardSum]),
    ],
)
def test_counters_are_taken_off_only_from_the_end_and_only_default_ones(transforms, left):
    env = TransformedEnv(cartpole(), Compose(*(make() for make in transforms)))
    stripped = without_counters(env)
    if left:
        assert [type(transform) for transform in stripped.transform] == left
    else:
        assert type(stripped) is GymEnv
