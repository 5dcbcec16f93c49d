"""Collecting in the background: ``start``, ``pause``, ``getattr_rb``, ``async_shutdown``."""

import time
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.testing.mocking_classes import EnvThatErrorsAfter10Iters

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


def test_start_fills_the_buffer_while_the_caller_does_something_else(make_collector):
    """TorchRL: test_start_single, test_start_multi, test_start_update_policy."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer)
    collector.start()
    wait_until(lambda: collector.getattr_rb("write_count") >= 100)
    assert collector.is_running()
    collector.increment_version()
    count = buffer.write_count
    wait_until(lambda: buffer.write_count >= count + 200)
    assert buffer[:]["policy_version"].max() == 1
    assert buffer.sample().shape == (8,)
    collector.async_shutdown()
    assert not collector.is_running()
    count = buffer.write_count
    time.sleep(0.1)
    assert buffer.write_count == count


def test_the_background_ends_with_total_frames(make_collector):
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer, total_frames=80)
    collector.start()
    wait_until(lambda: not collector.is_running())
    assert collector.getattr_rb("write_count") == 80


def test_nothing_is_written_inside_a_pause(make_collector):
    """TorchRL: test_pause."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer)
    with collector.pause():
        pass  # not started: nothing to wait for
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    for _ in range(3):
        with collector.pause():
            count = buffer.write_count
            time.sleep(0.1)
            assert buffer.write_count == count
        wait_until(lambda: buffer.write_count > count)  # noqa: B023 (called at once)


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


def test_without_a_buffer_start_only_starts_the_workers(make_collector):
    collector = make_collector("CartPole-v1")
    collector.start()
    assert not collector.is_running()
    assert next(iter(collector)).batch_size == (4, 5)


@pytest.mark.multiprocess
def test_a_collector_that_fills_a_buffer_can_be_forgotten(make_collector, family):
    """The interpreter's end, with the thread running, leaves nobody behind: see the fixture."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer, num_workers=1)
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    assert family.members()


def test_a_hook_of_the_background_may_pause_it(make_collector):
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer, total_frames=60)

    def hook(batch):
        with collector.pause():
            collector.increment_version()

    collector.set_post_collect_hook(hook)
    collector.start()
    wait_until(lambda: not collector.is_running())
    assert collector.getattr_rb("write_count") == 60
    assert collector.policy_version == 3


def test_random_frames_come_first_in_the_background_too(make_collector):
    """TorchRL: TestInitRandomFramesWithStart."""

    def still(observation):
        return torch.zeros(observation.shape[0], 1)

    buffer = buffer_of()
    collector = make_collector(
        "Pendulum-v1", still, replay_buffer=buffer, init_random_frames=40, total_frames=80
    )
    collector.start()
    wait_until(lambda: not collector.is_running())
    assert (buffer[:40]["action"] != 0).all()
    assert (buffer[40:80]["action"] == 0).all()


def test_weights_are_renewed_in_the_background(make_collector):
    """TorchRL: test_start_update_policy."""
    buffer, net = buffer_of(), torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(net.weight)
    torch.nn.init.zeros_(net.bias)
    policy = TensorDictModule(net, ["observation"], ["action"])
    collector = make_collector("Pendulum-v1", policy, replay_buffer=buffer)
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    with torch.no_grad():
        net.bias.fill_(0.5)
    collector.update_policy_weights_(policy)
    wait_until(lambda: (buffer[:]["policy_version"] == 1).any())
    with collector.pause():
        steps = buffer[:]
    renewed = steps["policy_version"] == 1
    assert (steps["action"][renewed] == 0.5).all()
    assert (steps["action"][~renewed] == 0).all()


def test_nobody_iterates_beside_the_background(make_collector):
    """Both would take each other's rollouts."""
    collector = make_collector("CartPole-v1", replay_buffer=buffer_of())
    collector.start()
    with pytest.raises(RuntimeError, match="start"):
        next(iter(collector))
    assert collector.is_running()


def test_the_background_is_started_once_and_ended_as_often_as_one_likes(make_collector):
    """TorchRL: test_shutdown_idempotent."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer)
    collector.start()
    collector.start()
    wait_until(lambda: buffer.write_count > 0)
    collector.async_shutdown(timeout=30)
    collector.async_shutdown()
    collector.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        collector.start()
