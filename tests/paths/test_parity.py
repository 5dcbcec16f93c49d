"""Whatever path an env takes, the batch is the one that TorchRL's own Collector gives."""

from functools import cache, partial

import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from seeded import cartpole, doubles, pendulum, picture, telling, telling_pair
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import (
    Compose,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)

T, STEPS = 10, 120


def leaning(observation):
    """Lets the pole fall: some episodes end by themselves, some by the limit."""
    return (observation.double().sum(-1) < 0.02).long()


def one_hot_leaning(observation):
    return torch.nn.functional.one_hot(leaning(observation), 2)


def pulling(observation):
    return 2 * observation[..., :1] - observation[..., 1:2]


def policy(function, key="observation"):
    return TensorDictModule(function, [key], ["action"])


def wrapped(make, **kwargs):
    return GymWrapper(make(**kwargs), categorical_action_encoding=True)


def one_hot(make):
    return GymWrapper(make())


def counted(make, **kwargs):
    return TransformedEnv(
        wrapped(make, **kwargs), Compose(InitTracker(), StepCounter(), RewardSum())
    )


def transformed(make):
    """Something follows the counters, so that they stay, and the env is stepped as TorchRL's."""
    env = counted(make)
    env.append_transform(RewardScaling(loc=0.0, scale=1.0))
    return env


def one_hot_transformed(make):
    return TransformedEnv(one_hot(make), RewardScaling(loc=0.0, scale=1.0))


@cache
def reference(make, base, function, key="observation", encode=True):
    """``STEPS`` steps of TorchRL's own Collector with the three counters, flat."""
    actor = policy(function, key)
    env = GymWrapper(make(base=base), categorical_action_encoding=encode)
    env = TransformedEnv(env, Compose(InitTracker(), StepCounter(), RewardSum()))
    collector = Collector(env, actor, frames_per_batch=STEPS, total_frames=STEPS)
    (batch,) = list(collector)
    collector.shutdown()
    return batch


def lanes_of(collector, count):
    """The steps of each env in time, flat; the first batch of a collector with one split."""
    batch = next(iter(collector))
    return [batch[lane::count].reshape(-1) for lane in range(count)]


def assert_same(found, expected):
    """Every leaf, but the version that TorchRL has not and the names of trajectories."""
    found, expected = found.copy(), expected.copy()
    del found["policy_version"]
    ids, expected_ids = (td.pop("collector")["traj_ids"] for td in (found, expected))
    assert (ids.diff() == 0).tolist() == (expected_ids.diff() == 0).tolist()
    found, expected = (
        dict(td.items(include_nested=True, leaves_only=True)) for td in (found, expected)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        # RewardSum adds up in single precision, workers in double.
        is_sum = "episode_reward" in key
        rtol, atol = (1e-5, 1e-4) if is_sum else (0, 0)
        torch.testing.assert_close(
            found[key], value, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}"
        )


def assert_has_all_endings(batch):
    assert batch["next", "terminated"].any()
    assert batch["next", "truncated"].any()


SINGLE = {
    "raw": lambda make: make,
    "bare wrapper": lambda make: partial(wrapped, make),
    "counters": lambda make: partial(counted, make),
    "transformed": lambda make: partial(transformed, make),
}
PATHS = {"raw": "raw", "bare wrapper": "raw", "counters": "raw", "transformed": "generic"}


@pytest.mark.parametrize("kind", SINGLE)
@pytest.mark.parametrize(
    ("make", "function"),
    [(cartpole, leaning), (doubles, leaning), (picture, leaning), (pendulum, pulling)],
)
def test_single_envs_give_torchrls_batch(make_collector, kind, make, function):
    actor = policy(function)
    collector = make_collector(
        SINGLE[kind](make),
        actor,
        num_envs_per_worker=2,
        rollout_length=T,
        frames_per_batch=2 * STEPS,
    )
    assert collector.stats()["path"] == PATHS[kind]
    lanes = lanes_of(collector, 2)
    bases = collector._engine._parts.env_seeds(0)
    for lane, base in zip(lanes, bases, strict=True):
        expected = reference(make, base, function)
        assert_same(lane, expected)
    if make is cartpole:
        assert_has_all_endings(torch.cat(lanes))


@pytest.mark.parametrize("path", ["raw", "generic"])
def test_one_hot_actions_give_torchrls_batch(make_collector, path):
    actor = policy(one_hot_leaning)
    make = {"raw": one_hot, "generic": one_hot_transformed}[path]
    collector = make_collector(
        partial(make, cartpole),
        actor,
        num_envs_per_worker=1,
        rollout_length=T,
        frames_per_batch=STEPS,
    )
    assert collector.stats()["path"] == path
    (lane,) = lanes_of(collector, 1)
    assert lane["action"].shape == (STEPS, 2)
    (base,) = collector._engine._parts.env_seeds(0)
    assert_same(lane, reference(cartpole, base, one_hot_leaning, encode=False))


def sync(mode, make=telling):
    return SyncVectorEnv([make] * 3, autoreset_mode=mode)


VECTORIZED = {
    "SyncVectorEnv, SAME_STEP": partial(sync, AutoresetMode.SAME_STEP),
    "SyncVectorEnv, DISABLED": partial(sync, AutoresetMode.DISABLED),
    "AsyncVectorEnv, SAME_STEP": lambda: AsyncVectorEnv(
        [telling] * 3, autoreset_mode=AutoresetMode.SAME_STEP
    ),
    "AsyncVectorEnv, DISABLED": lambda: AsyncVectorEnv(
        [telling] * 3, autoreset_mode=AutoresetMode.DISABLED
    ),
    "GymWrapper, DISABLED": lambda: GymWrapper(
        sync(AutoresetMode.DISABLED), categorical_action_encoding=True
    ),
    "SerialEnv": lambda: SerialEnv(3, partial(wrapped, telling)),
    "ParallelEnv": lambda: ParallelEnv(3, partial(wrapped, telling), mp_start_method="fork"),
    "SerialEnv with counters": lambda: SerialEnv(3, partial(counted, telling)),
}


CONTINUOUS = {
    "SyncVectorEnv, SAME_STEP": partial(sync, AutoresetMode.SAME_STEP, pendulum),
    "SyncVectorEnv, DISABLED": partial(sync, AutoresetMode.DISABLED, pendulum),
    "SerialEnv": lambda: SerialEnv(3, partial(wrapped, pendulum)),
}


@pytest.mark.parametrize("kind", VECTORIZED)
def test_envs_stepped_at_once_give_torchrls_batch(make_collector, kind):
    actor = policy(leaning, "seen")
    collector = make_collector(
        VECTORIZED[kind],
        actor,
        num_envs_per_worker=None,
        rollout_length=T,
        frames_per_batch=3 * STEPS,
    )
    assert collector.stats()["path"] == "vectorized"
    lanes = lanes_of(collector, 3)
    bases = [int(lane["base"][0]) for lane in lanes]
    assert len(set(bases)) == 3
    for lane, base in zip(lanes, bases, strict=True):
        assert_same(lane, reference(telling, base, leaning, "seen"))
    assert_has_all_endings(torch.cat(lanes))


@pytest.mark.parametrize(
    "kind", ["SyncVectorEnv, SAME_STEP", "SyncVectorEnv, DISABLED", "SerialEnv"]
)
def test_continuous_actions_of_envs_stepped_at_once_give_torchrls_batch(make_collector, kind):
    actor, make_vector = policy(pulling), CONTINUOUS[kind]
    collector = make_collector(
        make_vector, actor, num_envs_per_worker=3, rollout_length=T, frames_per_batch=3 * STEPS
    )
    lanes, bases = lanes_of(collector, 3), collector._engine._parts.env_seeds(0)
    if kind == "SerialEnv":
        bases = bases[:1]  # it makes the others of the first
    for lane, base in zip(lanes, bases, strict=False):
        assert_same(lane, reference(pendulum, base, pulling))


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (telling, "raw"),
        (partial(transformed, telling), "generic"),
        (telling_pair, "vectorized"),
    ],
)
def test_worker_processes_give_torchrls_batch_and_share_no_seed_and_no_trajectory(
    make_collector, make, path
):
    actor = policy(leaning, "seen")
    collector = make_collector(
        make,
        actor,
        num_workers=2,
        num_envs_per_worker=2,
        rollout_length=STEPS,
        frames_per_batch=4 * STEPS,
        async_mode=False,  # one rollout of each env in a batch, however fast each is
    )
    batch = next(iter(collector))
    assert collector.stats()["path"] == path
    for row in batch:
        base = int(row["base"][0])
        assert_same(row, reference(telling, base, leaning, "seen"))
    bases, ids = batch["base"].flatten(), batch["collector", "traj_ids"].flatten()
    assert bases.unique().numel() == 4
    pairs = torch.stack([bases, ids], -1).unique(dim=0)
    assert len(pairs) == ids.unique().numel() > 4 * 8


@pytest.mark.parametrize("make", [cartpole, partial(transformed, cartpole)])
def test_what_follows_a_step_is_the_next_root_unless_the_episode_has_ended(make_collector, make):
    collector = make_collector(
        make, policy(leaning), num_envs_per_worker=1, rollout_length=7, frames_per_batch=7
    )
    batches = [batch.reshape(-1) for _, batch in zip(range(20), collector, strict=False)]
    steps: TensorDict = torch.cat(batches)
    going_on = ~steps["next", "done"][:-1, 0]
    for key in ("observation", "step_count", "episode_reward"):
        after, before = steps["next", key][:-1], steps[key][1:]
        assert (after[going_on] == before[going_on]).all()
    assert (steps["is_init"][1:, 0] == ~going_on).all()
    assert (~going_on).sum() >= 5
