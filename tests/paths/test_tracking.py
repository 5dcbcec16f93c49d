"""Where an episode begins, how long it is and what it earned: counted by workers, on every path."""

from functools import partial
from itertools import islice

import pytest
import torch
from endings import PATHS, lanes
from envs import BoxActionEnv, CountingEnv, Ledger
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from seeded import telling

LENGTHS, ENDS = (3, 5, 12), ("terminated", "truncated", "both")
FOUR = {"num_envs_per_worker": 4, "num_splits": 2, "frames_per_batch": 40, "rollout_length": 5}


class Oracle:
    """Counts an env's steps and rewards by hand."""

    def __init__(self):
        self._count, self._sum, self._id = 0, 0.0, None
        self.ids = []

    def follow(self, step):
        before, after = step, step["next"]
        assert before["is_init"] == (self._count == 0)
        assert before["step_count"] == self._count
        assert before["episode_reward"] == self._sum
        if self._count == 0:
            self._id = int(step["collector", "traj_ids"])
            self.ids.append(self._id)
        assert step["collector", "traj_ids"] == self._id
        self._count += 1
        self._sum += after["reward"].item()
        assert not after["is_init"]
        assert after["step_count"] == self._count
        assert after["episode_reward"] == self._sum
        if after["done"]:
            self._count, self._sum = 0, 0.0


@pytest.mark.parametrize("kind", PATHS)
def test_counts_are_those_made_by_hand_over_rollouts_and_episodes(make_collector, kind):
    make, path = PATHS[kind]
    env = partial(make, partial(CountingEnv, length=LENGTHS, ends=ENDS))
    collector = make_collector(env, **FOUR)
    oracles = [Oracle() for _ in range(4)]
    for batch in islice(collector, 6):
        for oracle, lane in zip(oracles, lanes(batch, 4), strict=True):
            for step in lane:
                oracle.follow(step)
    ids = [traj_id for oracle in oracles for traj_id in oracle.ids]
    assert len(ids) == len(set(ids)) >= 4 * 8
    assert collector.stats()["path"] == path


@pytest.mark.parametrize("kind", PATHS)
def test_episodes_end_as_the_env_says(make_collector, kind):
    make, _ = PATHS[kind]
    env = partial(make, partial(CountingEnv, length=LENGTHS, ends=ENDS))
    collector = make_collector(env, **FOUR)
    steps = torch.cat([torch.stack(lanes(batch, 4)) for batch in islice(collector, 6)], 1)
    after = steps["next"]
    episode = after["observation"][..., 1]
    last = after["observation"][..., 2] == torch.tensor(LENGTHS)[episode % 3]
    terminated = torch.tensor([True, False, True])[episode % 3] & last
    truncated = torch.tensor([False, True, True])[episode % 3] & last
    assert torch.equal(after["done"][..., 0], last)
    assert torch.equal(after["terminated"][..., 0], terminated)
    assert torch.equal(after["truncated"][..., 0], truncated)
    assert last.sum() >= 4 * 8


@pytest.mark.parametrize("kind", PATHS)
def test_each_env_has_a_seed_of_its_own(make_collector, kind):
    make, _ = PATHS[kind]
    collector = make_collector(partial(make, telling), **FOUR)
    of_each = next(iter(collector))["base"].flatten(1)
    assert (of_each == of_each[:, :1]).all()  # a rollout is of one env
    assert of_each.unique().numel() == 4


@pytest.mark.parametrize("kind", PATHS)
def test_no_trajectory_has_the_id_of_one_from_before_a_resumption(make_collector, kind):
    make, _ = PATHS[kind]
    env, seen, state = partial(make, partial(CountingEnv, length=3)), [], None
    for _ in range(3):
        collector = make_collector(env, **FOUR)
        if state is not None:
            collector.load_state_dict(state)
        for batch in islice(collector, 3):
            seen += batch["collector", "traj_ids"][batch["is_init"][..., 0]].tolist()
        state = collector.state_dict()
    assert len(seen) == len(set(seen)) >= 3 * 4 * 10


def test_a_resumed_collector_does_not_repeat_the_seeds_of_its_first_episodes(make_collector):
    first = make_collector(telling, **FOUR)
    before = next(iter(first))["base"].unique()
    second = make_collector(telling, **FOUR)
    second.load_state_dict(first.state_dict())
    assert not torch.isin(next(iter(second))["base"].unique(), before).any()


# -- envs that are not careful with memory -------------------------------------------------------


@pytest.mark.parametrize("kind", ["raw", "bare wrapper", "SyncVectorEnv, DISABLED"])
def test_an_env_that_overwrites_its_observation_loses_no_final_one(make_collector, kind):
    make, _ = PATHS[kind]
    found = []
    for reuse in (False, True):
        env = partial(CountingEnv, length=LENGTHS, ends=ENDS, reuse_buffer=reuse)
        collector = make_collector(partial(make, env), **FOUR)
        found.append(torch.cat(list(islice(collector, 4))))
    expected, reused = found
    assert expected["next", "done"].any()
    assert torch.equal(reused["observation"], expected["observation"])
    assert torch.equal(reused["next", "observation"], expected["next", "observation"])


@pytest.mark.parametrize("kind", PATHS)
def test_an_env_that_overwrites_its_action_does_not_change_the_batch(make_collector, kind):
    make, _ = PATHS[kind]
    collector = make_collector(partial(make, BoxActionEnv), **FOUR)
    for batch in islice(collector, 3):
        assert torch.equal(batch["action"], batch["next", "observation"])  # as it was given


class Scribbling(SyncVectorEnv):
    """Overwrites the whole array of actions."""

    def step(self, actions):
        result = super().step(actions)
        actions[...] = 0
        return result


def test_a_vector_env_that_overwrites_its_actions_does_not_change_the_batch(make_collector):
    env = partial(CountingEnv, length=LENGTHS, ends=ENDS)
    make = partial(Scribbling, [env] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    ledger = Ledger(LENGTHS, ENDS)
    for batch in islice(make_collector(make, **FOUR), 4):
        ledger.follow(batch)
    assert len(ledger.episodes) > 8
