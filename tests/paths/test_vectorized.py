"""Envs that step several at once: nothing is lost at an episode's end, and no row is another's."""

from functools import partial
from itertools import islice

import gymnasium
import numpy as np
import pytest
import torch
from endings import lanes
from envs import BoxActionEnv, CountingDictEnv, CountingEnv, Ledger, pixels_of
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from seeded import cartpole, telling
from torchrl.envs import GymEnv, GymWrapper, SerialEnv, StepCounter, TransformedEnv

from sf_torchrl import SharedMemoryCollector

LENGTHS, ENDS = (3, 5, 12), ("terminated", "truncated", "both")
MODES = (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED)


def vector(kind, env, mode, count=2, **options):
    counting = partial(env, length=LENGTHS, ends=ENDS, **options)
    return kind([counting] * count, autoreset_mode=mode)


# -- every step ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("num_envs", "num_splits"), [(2, 1), (4, 2), (6, 1), (12, 2)], ids=lambda n: str(n)
)
def test_every_step_of_every_row_is_what_the_env_did(make_collector, mode, num_envs, num_splits):
    collector = make_collector(
        partial(vector, SyncVectorEnv, CountingEnv, mode),
        num_envs_per_worker=num_envs,
        num_splits=num_splits,
        frames_per_batch=5 * num_envs,
    )
    ledger = Ledger(LENGTHS, ENDS)
    for batch in islice(collector, 10):
        ledger.follow(batch)
    assert len(ledger.seeds) == num_envs
    assert len(ledger.episodes) >= 6 * num_envs
    ledger.check_traj_ids()
    assert collector.stats()["episodes"] == len(ledger.episodes)


@pytest.mark.parametrize("mode", MODES)
def test_actions_count_from_the_envs_own_start(make_collector, mode):
    make = partial(vector, SyncVectorEnv, CountingEnv, mode, num_actions=3, first_action=2)
    ledger = Ledger(LENGTHS, ENDS, first_action=2)
    for batch in islice(make_collector(make), 6):
        ledger.follow(batch)
    assert ledger.num_steps == 120


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        (SyncVectorEnv, AutoresetMode.SAME_STEP),
        (SyncVectorEnv, AutoresetMode.DISABLED),
        (AsyncVectorEnv, AutoresetMode.SAME_STEP),
        (AsyncVectorEnv, AutoresetMode.DISABLED),
    ],
)
def test_every_key_of_a_nested_dict_is_kept_at_an_episodes_end(make_collector, kind, mode):
    collector = make_collector(partial(vector, kind, CountingDictEnv, mode))
    ledger = Ledger(LENGTHS, ENDS)
    for batch in islice(collector, 6):
        ledger.follow(batch, key="count")
        for part in (batch, batch["next"]):
            step = part["count"][..., 2].numpy()
            np.testing.assert_array_equal(part["speed"].numpy(), np.float32(step / 2))
            np.testing.assert_array_equal(part["camera", "pixels"].numpy(), pixels_of(step))
    assert len(ledger.episodes) > 8


@pytest.mark.parametrize("mode", MODES)
def test_continuous_actions_reach_each_row_clipped(make_collector, mode):
    def act(observation):
        row = torch.arange(len(observation), dtype=torch.float32)
        return torch.stack([row - 1.5, row], -1)

    make = partial(SyncVectorEnv, [BoxActionEnv] * 4, autoreset_mode=mode)
    low, high = torch.tensor(BoxActionEnv.LOW), torch.tensor(BoxActionEnv.HIGH)
    (batch,) = islice(make_collector(make, act, num_envs_per_worker=4, frames_per_batch=80), 1)
    assert torch.equal(batch["action"][:4, 0, 1], torch.arange(4.0))
    assert torch.equal(batch["next", "observation"], batch["action"].clamp(low, high))


def test_several_batched_torchrl_envs_stand_side_by_side(make_collector):
    def make():
        return SerialEnv(2, lambda: GymWrapper(telling(), categorical_action_encoding=True))

    collector = make_collector(
        make, num_envs_per_worker=8, num_splits=2, rollout_length=20, frames_per_batch=320
    )
    (batch,) = islice(collector, 1)
    assert batch["base"].unique().numel() == 8
    for lane in lanes(batch, 8):
        assert lane["base"].unique().numel() == 1
        going_on = ~lane["next", "done"][:-1, 0]
        assert torch.equal(lane["next", "seen"][:-1][going_on], lane["seen"][1:][going_on])
        assert (~going_on).any()


# -- what is refused -----------------------------------------------------------------------------


def next_step(wrap):
    return wrap(SyncVectorEnv([cartpole] * 2, autoreset_mode=AutoresetMode.NEXT_STEP))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="async"),
        lambda: gymnasium.make_vec(
            "CartPole-v1", num_envs=2, vectorization_mode="vector_entry_point"
        ),
        partial(next_step, RecordEpisodeStatistics),
        # TorchRL's own AsyncVectorEnv, whose mode it does not look at.
        lambda: GymEnv("CartPole-v1", num_envs=2),
        lambda: TransformedEnv(GymEnv("CartPole-v1", num_envs=2), StepCounter()),
    ],
    ids=["make_vec, async", "make_vec, its own", "in a wrapper", "GymEnv", "TransformedEnv"],
)
def test_autoreset_in_the_next_step_is_refused_in_one_sentence(make):
    with pytest.raises(ValueError, match="NEXT_STEP, whose steps after an episode's end are no"):
        SharedMemoryCollector(make, frames_per_batch=1024)


@pytest.mark.parametrize(
    ("num_envs", "num_splits", "example"), [(3, 1, 2), (2, 2, 4), (6, 2, 4), (1, 1, 2)]
)
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(num_envs, num_splits, example):
    make = partial(vector, SyncVectorEnv, CountingEnv, AutoresetMode.SAME_STEP)
    options = {"num_envs_per_worker": num_envs, "num_splits": num_splits}
    with pytest.raises(ValueError, match=rf"steps 2 envs at once: .*e\.g\. {example}$"):
        SharedMemoryCollector(make, frames_per_batch=1024, **options)


def test_workers_with_envs_of_different_numbers_are_refused_by_their_numbers(family):
    makes = [
        partial(vector, SyncVectorEnv, CountingEnv, AutoresetMode.SAME_STEP, count)
        for count in (2, 3)
    ]
    with pytest.raises(ValueError, match=r"differ between workers: .*\b2\b.*\b3\b"):
        SharedMemoryCollector(makes, frames_per_batch=1024)
    assert family.members() == {}


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_without_a_number_of_envs_each_split_has_one_object(make_collector, num_splits):
    make = partial(vector, SyncVectorEnv, CountingEnv, AutoresetMode.SAME_STEP, 3)
    collector = make_collector(
        make, num_envs_per_worker=None, num_splits=num_splits, frames_per_batch=90
    )
    assert collector.config.num_envs_per_worker == 3 * num_splits


# -- gymnasium's vector envs in TorchRL's wrapper ------------------------------------------------


def pushed(observation, action):
    """CartPole's next observation, from gymnasium's own physics."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset()
    found = []
    for state, push in zip(observation.double().tolist(), action.tolist(), strict=True):
        env.state, env.steps_beyond_terminated = state, None
        found.append(torch.from_numpy(env.step(push)[0]))
    return torch.stack(found)


def assert_follows_from_physics(batch, limit):
    """Every step of CartPoles, those before a reset too."""
    flat = batch.reshape(-1)
    expected = pushed(flat["observation"], flat["action"])
    torch.testing.assert_close(flat["next", "observation"], expected, atol=1e-5, rtol=1e-5)
    after = flat["next"]
    assert torch.equal(after["done"], after["terminated"] | (after["step_count"] == limit))
    assert after["terminated"].any()
    assert after["truncated"].any()


def in_torchrls_wrapper(make, mode):
    return GymWrapper(
        SyncVectorEnv([make] * 3, autoreset_mode=mode), categorical_action_encoding=True
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_wrapped_vector_env_loses_no_final_observation(make_collector, mode):
    make = partial(in_torchrls_wrapper, partial(cartpole, limit=12), mode)
    (batch,) = islice(make_collector(make, num_envs_per_worker=3, frames_per_batch=600), 1)
    assert_follows_from_physics(batch, 12)


def test_a_wrapped_vector_env_loses_no_key_of_a_final_observation(make_collector):
    make = partial(in_torchrls_wrapper, telling, AutoresetMode.SAME_STEP)
    with pytest.raises(ValueError, match="loses parts of a Dict's final observation"):
        make_collector(make)
    make = partial(in_torchrls_wrapper, telling, AutoresetMode.DISABLED)
    (batch,) = islice(make_collector(make, num_envs_per_worker=3, frames_per_batch=150), 1)
    assert batch["next", "done"].any()
    assert torch.equal(batch["next", "base"], batch["base"])


# -- EnvPool -------------------------------------------------------------------------------------


def pool(task="CartPole-v1", **options):
    envpool = pytest.importorskip("envpool")
    return envpool.make(task, env_type="gymnasium", num_envs=3, max_episode_steps=12, **options)


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
def test_every_step_of_an_envpool_follows_from_its_own_rows_action(make_collector):
    pytest.importorskip("envpool")
    collector = make_collector(pool, num_envs_per_worker=6, frames_per_batch=600)
    (batch,) = islice(collector, 1)
    assert_follows_from_physics(batch, 12)


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
def test_an_envpool_takes_continuous_actions(make_collector):
    pytest.importorskip("envpool")
    collector = make_collector(
        partial(pool, "Pendulum-v1"), num_envs_per_worker=3, frames_per_batch=90, rollout_length=30
    )
    (batch,) = islice(collector, 1)
    assert batch["action"].shape == (3, 30, 1)
    ends = batch["next", "truncated"][..., 0].nonzero()[:, 1].tolist()
    assert ends == [11, 23] * 3
    assert not batch["next", "terminated"].any()
    speed = batch["next", "observation"][..., 2]
    assert speed[:, 11].unique().numel() == 3  # each its own episode


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")
def test_one_seed_gives_one_envpool_and_another_another(make_collector):
    pytest.importorskip("envpool")
    options = {"num_envs_per_worker": 3, "frames_per_batch": 60}
    (a,), (b,), (c,) = (islice(make_collector(pool, seed=seed, **options), 1) for seed in (1, 1, 2))
    assert torch.equal(a["observation"], b["observation"])
    assert not torch.isin(c["observation"][:, 0], a["observation"]).any()
