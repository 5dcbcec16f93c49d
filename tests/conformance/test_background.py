"""Collecting in the background: ``start``, ``pause``, ``getattr_rb``, ``async_shutdown``."""

import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from family import Family
from policies import Pushing
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.testing.mocking_classes import EnvThatErrorsAfter10Iters

from sf_torchrl import SharedMemoryCollector

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def buffer_of(size=1000, ndim=1, **kwargs):
    return ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), batch_size=8, **kwargs)


@pytest.fixture
def make_collector(make_collector):
    """With a worker process: nothing acts in a thread of this one."""
    return partial(make_collector, num_workers=1)


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@contextmanager
def pendulum(**options):
    """A collector that fills a buffer in the background, with its buffer."""
    with Family().adopting() as family:
        buffer = buffer_of()
        collector = SharedMemoryCollector(
            "Pendulum-v1",
            Pushing(),
            replay_buffer=buffer,
            num_workers=1,
            num_envs_per_worker=2,
            num_splits=1,
            rollout_length=5,
            frames_per_batch=20,
            seed=1,
            **options,
        )
        try:
            yield collector, buffer
        finally:
            collector.shutdown()
    family.assert_gone()


# -- a run that has come to its end --------------------------------------------------------------


@pytest.fixture(scope="module")
def ended():
    """80 frames, the first 40 random, with a hook that pauses at every batch."""
    with pendulum(init_random_frames=40, total_frames=80) as (collector, buffer):

        def hook(batch):
            with collector.pause():
                collector.increment_version()

        collector.set_post_collect_hook(hook)
        collector.start()
        wait_until(lambda: not collector.is_running())
        yield collector, buffer


def test_the_background_ends_with_total_frames(ended):
    collector, _ = ended
    assert collector.getattr_rb("write_count") == 80


def test_a_hook_of_the_background_may_pause_it(ended):
    collector, _ = ended
    assert collector.policy_version == 4


def test_random_frames_come_first_in_the_background_too(ended):
    """TorchRL: TestInitRandomFramesWithStart."""
    _, buffer = ended
    assert (buffer[:40]["action"] != 0).all()
    assert (buffer[40:80]["action"] == 0).all()


# -- a run without end ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running():
    """Goes on from test to test."""
    with pendulum() as (collector, buffer):
        collector.start()
        yield collector, buffer


def test_start_fills_the_buffer_while_the_caller_does_something_else(running):
    """TorchRL: test_start_single, test_start_multi."""
    collector, buffer = running
    wait_until(lambda: collector.getattr_rb("write_count") >= 100)
    assert collector.is_running()
    assert buffer.sample().shape == (8,)


def test_nothing_is_written_inside_a_pause(running):
    """TorchRL: test_pause."""
    collector, buffer = running
    wait_until(lambda: buffer.write_count > 0)
    for _ in range(3):
        with collector.pause():
            count = buffer.write_count
            time.sleep(0.1)
            assert buffer.write_count == count
        wait_until(lambda: buffer.write_count > count)  # noqa: B023 (called at once)


def test_weights_are_renewed_in_the_background(running):
    """TorchRL: test_start_update_policy."""
    collector, buffer = running
    wait_until(lambda: buffer.write_count > 0)
    version = collector.policy_version
    with torch.no_grad():
        collector.policy.bias.fill_(0.5)
    collector.update_policy_weights_(collector.policy)
    wait_until(lambda: (buffer[:]["policy_version"] > version).any())
    with collector.pause():
        steps = buffer[:].clone()  # a view otherwise, of what is being written on
    renewed = steps["policy_version"] > version
    assert (steps["action"][renewed] == 0.5).all()
    assert (steps["action"][~renewed] == 0).all()


def test_a_version_is_raised_in_the_background(running):
    """TorchRL: test_start_update_policy."""
    collector, buffer = running
    version = collector.policy_version + 1
    collector.increment_version()
    wait_until(lambda: buffer[:]["policy_version"].max() == version)


def test_nobody_iterates_beside_the_background(running):
    """Both would take each other's rollouts."""
    collector, _ = running
    with pytest.raises(RuntimeError, match="start"):
        next(iter(collector))
    assert collector.is_running()


# -- beginning and ending ------------------------------------------------------------------------


def test_what_goes_wrong_in_the_background_is_raised_where_one_looks(make_collector):
    buffer = buffer_of()
    collector = make_collector(EnvThatErrorsAfter10Iters, replay_buffer=buffer)
    collector.start()
    wait_until(lambda: not collector.is_running())
    with pytest.raises(RuntimeError, match="max steps"):
        collector.getattr_rb("write_count")
    with pytest.raises(RuntimeError, match="max steps"), collector.pause():
        pass
    collector.shutdown()


def test_a_collector_that_fills_a_buffer_can_be_forgotten(make_collector, family):
    """The interpreter's end, with the thread running, leaves nobody behind: see the fixture."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer)
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    assert family.members()


def test_the_background_is_started_once_and_ended_as_often_as_one_likes(make_collector):
    """TorchRL: test_shutdown_idempotent."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer)
    collector.start()
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    collector.async_shutdown(timeout=30)
    assert not collector.is_running()
    count = buffer.write_count
    time.sleep(0.1)
    assert buffer.write_count == count
    collector.async_shutdown()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.start()
