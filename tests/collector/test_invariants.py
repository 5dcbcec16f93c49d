"""What must hold at every instant of a run in several processes: ownership, labels, lag.

Each run is made once and looked at from several sides. Its policy's weights are all ``k`` in
version ``k``, and its envs count their steps, so that every step says by itself which weights chose
its action, what the policy saw, and what came of it.
"""

import fcntl
import struct
import termios
import time
from collections import deque
from functools import partial
from itertools import islice
from typing import NamedTuple

import pytest
import torch
from envs import CountingEnv, Ledger
from family import Family
from policies import TellingPolicy
from tensordict import TensorDict

from sf_torchrl import SharedMemoryCollector

pytestmark = pytest.mark.multiprocess

T = 5
NUM_ACTIONS = 3
ENV = partial(
    CountingEnv, length=(3, T, 13), ends=("truncated", "terminated"), num_actions=NUM_ACTIONS
)


def ledger():
    return Ledger((3, T, 13), ("truncated", "terminated"))


class Moment(NamedTuple):
    """One batch as it was when it was read."""

    batch: TensorDict
    as_it_was: TensorDict
    newest: int
    """Version published last before it was asked for."""


class Run(NamedTuple):
    """A run that has ended."""

    config: object
    moments: list[Moment]


def announced(collector):
    """Full slots that the workers have announced and nobody has read yet."""
    waiting = fcntl.ioctl(collector._engine._full.fd, termios.FIONREAD, bytes(4))
    return struct.unpack("i", waiting)[0] // 16


def read(collector, batches, newest):
    batch = next(batches)
    assert collector.policy_version == newest
    return Moment(batch, batch.clone(), newest)


@pytest.fixture(scope="module")
def family_of_runs():
    with Family().adopting() as family:
        yield family
    family.assert_gone()


FROZEN_FOR = 10  # versions published while the workers are stalled


@pytest.fixture(scope="module")
def asynchronous(family_of_runs):
    """Two workers of two splits of two envs; first nobody reads, then every batch is answered by a
    publication. A batch is three rollouts: one and a half slots.
    """
    policy = TellingPolicy(NUM_ACTIONS)
    collector = SharedMemoryCollector(
        ENV,
        policy,
        num_workers=2,
        num_envs_per_worker=4,
        num_splits=2,
        rollout_length=T,
        frames_per_batch=3 * T,
        seed=3,
    )
    moments = []
    try:
        collector.start()
        while announced(collector) < collector.config.num_slots:
            time.sleep(0.01)
        for _ in range(FROZEN_FOR):
            collector.update_policy_weights_(policy.become(collector.policy_version + 1))
        batches = iter(collector)
        for _ in range(200):
            moments.append(read(collector, batches, collector.policy_version))
            collector.update_policy_weights_(policy.become(collector.policy_version + 1))
    finally:
        collector.shutdown()
    return Run(collector.config, moments)


@pytest.fixture(scope="module")
def synchronous(family_of_runs):
    """Waits for the learner, which publishes twice, never, once, three times... between batches."""
    policy = TellingPolicy(NUM_ACTIONS)
    collector = SharedMemoryCollector(
        ENV,
        policy,
        num_workers=2,
        num_envs_per_worker=2,
        num_splits=2,
        rollout_length=T,
        frames_per_batch=2 * 4 * T,  # two rollouts of every env
        async_mode=False,
        seed=3,
    )
    moments = []
    try:
        batches = iter(collector)
        for publications in [2, 0, 1, 3, 0, 0, 1, 1, 2, 5] * 3:
            moments.append(read(collector, batches, collector.policy_version))
            for _ in range(publications):
                collector.update_policy_weights_(policy.become(collector.policy_version + 1))
    finally:
        collector.shutdown()
    return Run(collector.config, moments)


@pytest.fixture(params=["asynchronous", "synchronous"])
def run(request):
    """Either."""
    return request.getfixturevalue(request.param)


# -- both ways of collecting ---------------------------------------------------------------------


def test_every_step_is_what_the_env_did_and_no_rollout_is_lost_or_read_twice(run):
    book = ledger()
    for moment in run.moments:
        book.follow(moment.batch)
    assert book.num_steps == len(run.moments) * run.config.frames_per_batch
    assert len(book.seeds) == run.config.num_envs
    book.check_traj_ids()


def test_the_policy_saw_the_observation_that_its_action_stands_beside(run):
    for moment in run.moments:
        assert torch.equal(moment.batch["seen"], moment.batch["observation"])


def test_weights_are_whole(run):
    for moment in run.moments:
        lowest, highest = moment.batch["told"].unbind(-1)
        assert torch.equal(lowest, highest)


def test_a_label_is_the_version_of_the_weights_that_chose_the_action(run):
    for moment in run.moments:
        label = moment.batch["policy_version"]
        assert torch.equal(label, moment.batch["told"][..., 0].long())
        assert torch.equal(label % NUM_ACTIONS, moment.batch["action"])


def test_no_label_is_newer_than_what_was_published(run):
    for moment in run.moments:
        assert moment.batch["policy_version"].max() <= moment.newest


def test_labels_of_an_env_never_go_backwards(run):
    newest = {}
    for moment in run.moments:
        envs = moment.batch["observation"][:, 0, 0].tolist()
        for env, labels in zip(envs, moment.batch["policy_version"].tolist(), strict=True):
            assert [newest.get(env, 0), *labels] == sorted([newest.get(env, 0), *labels])
            newest[env] = labels[-1]


def test_a_batch_that_is_kept_stays_as_it_was_while_collecting_goes_on(run):
    for moment in run.moments:
        for key in moment.batch.keys(include_nested=True, leaves_only=True):
            assert torch.equal(moment.batch[key], moment.as_it_was[key])


# -- lag -----------------------------------------------------------------------------------------


def test_synchronous_collection_has_no_lag(synchronous):
    assert len({moment.newest for moment in synchronous.moments}) > 10
    for moment in synchronous.moments:
        assert (moment.batch["policy_version"] == moment.newest).all()


def test_synchronous_batches_hold_the_same_number_of_rollouts_of_every_env(synchronous):
    for moment in synchronous.moments:
        envs = moment.batch["observation"][:, 0, 0]
        assert envs.unique(return_counts=True)[1].tolist() == [2] * 4


def test_workers_that_nobody_reads_fill_their_slots_and_no_more(asynchronous):
    """All that was collected in advance fits the slots; what follows has the weights of the day."""
    ahead = 2 * 4 * 2  # slots of a split, splits, rollouts in a slot
    labels = torch.cat([moment.batch["policy_version"] for moment in asynchronous.moments])
    assert (labels[:ahead] == 0).all()
    assert (labels[ahead:] >= FROZEN_FOR).all()


def test_asynchronous_collection_keeps_up_with_what_is_published(asynchronous):
    last = asynchronous.moments[-1]
    assert last.newest == FROZEN_FOR + len(asynchronous.moments) - 1
    labels = torch.cat([moment.batch["policy_version"] for moment in asynchronous.moments])
    assert len(labels.unique()) > 20


# -- one owner -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slots(family_of_runs):
    """A collector of which nobody reads batches: its slots are taken and released by hand."""
    collector = SharedMemoryCollector(
        ENV,
        TellingPolicy(NUM_ACTIONS),
        num_workers=2,
        num_envs_per_worker=4,
        num_splits=2,
        rollout_length=T,
        frames_per_batch=4 * T,
        max_batches_in_flight=16,
        seed=3,
    )
    try:
        collector.start()
        yield collector
    finally:
        collector.shutdown()


def test_a_full_slot_is_not_written_before_it_is_released(slots):
    """Half of the slots are held back, each for as long as its split can go on without it."""
    engine, slab, config = slots._engine, slots._slab, slots.config
    leaves = [slab.numpy(*leaf.key) for leaf in slab.layout.leaves() if len(leaf.key) > 1]
    assert config.num_slots_per_split == 8

    def contents(slot):
        return [leaf[slot].tobytes() for leaf in leaves]

    held, times_filled = deque(), [0] * config.num_slots

    def release_all_but(count):
        while len(held) > count:
            slot, as_it_was = held.popleft()
            assert contents(slot) == as_it_was
            engine.release(slot)

    for _ in range(30 * config.num_slots):
        slot = engine.next_full()
        assert slot not in [other for other, _ in held]
        times_filled[slot] += 1
        held.append((slot, contents(slot)))
        release_all_but(config.num_slots // 2)
    assert sum(times > 5 for times in times_filled) >= config.num_slots // 2
    release_all_but(0)


def test_slots_belong_to_one_split_for_life(slots):
    engine, config = slots._engine, slots.config
    observation = slots._slab.numpy("observation", "observation")
    owners = {}
    for _ in range(20 * config.num_slots):
        slot = engine.next_full()
        envs = observation[slot, :, :, 0]
        assert (envs == envs[:, :1]).all()
        split = slot // config.num_slots_per_split
        assert owners.setdefault(split, envs[:, 0].tolist()) == envs[:, 0].tolist()
        engine.release(slot)
    assert len({env for envs in owners.values() for env in envs}) == config.num_envs


def test_forcing_actions_works_without_processes_too(make_collector):
    policy = TellingPolicy(NUM_ACTIONS)
    collector, book = make_collector(ENV, policy), ledger()
    for version, batch in enumerate(islice(collector, 30)):
        book.follow(batch)
        label = batch["policy_version"]
        assert torch.equal(label, batch["told"][..., 0].long())
        assert torch.equal(label % NUM_ACTIONS, batch["action"])
        assert torch.equal(batch["seen"], batch["observation"])
        assert label.max() <= version
        assert label.min() >= version - 1
        collector.update_policy_weights_(policy.become(version + 1))
