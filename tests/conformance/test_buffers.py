"""Replay buffers, whole trajectories, and collecting in the background, as TorchRL does it."""

import time
from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler, StalenessAwareSampler
from torchrl.testing.mocking_classes import CountingEnv, EnvThatErrorsAfter10Iters

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

counting = partial(CountingEnv, max_steps=4)


def ones(td):
    """An env that counts its actions then counts its steps: episodes of five."""
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int32))


def buffer_of(size=1000, ndim=1, **kwargs):
    return ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), batch_size=8, **kwargs)


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_a_buffer_gets_the_steps_and_the_caller_nothing(make_collector):
    """TorchRL: test_collector_rb_sync."""
    buffer = buffer_of()
    collector = make_collector(counting, ones, replay_buffer=buffer, total_frames=60)
    assert list(collector) == [None] * 3
    assert buffer.write_count == len(buffer) == collector.getattr_rb("write_count") == 60
    stored = buffer[:]
    assert stored["observation"].shape == (60, 1)
    assert (stored["collector", "traj_ids"][:5].diff() == 0).all()


def test_a_buffer_of_two_dimensions_gets_rollouts(make_collector):
    buffer = buffer_of(ndim=2)
    next(iter(make_collector(counting, ones, replay_buffer=buffer)))
    assert buffer[:].shape == (4, 5)


def test_the_same_steps_as_without_a_buffer(make_collector):
    buffer = buffer_of()
    for _ in zip(range(2), make_collector("CartPole-v1", replay_buffer=buffer), strict=False):
        pass
    batches = [b for _, b in zip(range(2), make_collector("CartPole-v1"), strict=False)]
    expected = torch.cat([batch.reshape(-1) for batch in batches])
    assert (
        buffer[:].select("observation", "action") == expected.select("observation", "action")
    ).all()


# -- whole trajectories --------------------------------------------------------------------------


def test_padded_trajectories(make_collector):
    """TorchRL: test_trajs_per_batch_integration."""
    collector = make_collector(
        counting, ones, trajs_per_batch=3, rollout_length=3, frames_per_batch=12
    )
    for _, batch in zip(range(4), collector, strict=False):
        assert batch.shape == (3, 5)
        assert batch["collector", "mask"].all()
        assert (batch["observation"][..., 0] == torch.arange(5)).all()
        assert batch["next", "done"][:, -1].all()


def test_trajectories_one_after_the_other(make_collector):
    """TorchRL: test_traj_format_cat_integration."""
    collector = make_collector(
        counting, ones, trajs_per_batch=4, traj_format="cat", rollout_length=3, frames_per_batch=12
    )
    batch = next(iter(collector))
    assert batch.shape == (20,)
    assert batch["next", "done"][4::5].all()
    assert batch["collector", "traj_ids"].unique().numel() == 4


def test_whole_trajectories_in_a_buffer_can_be_sliced(make_collector):
    sampler = SliceSampler(slice_len=5, end_key=("next", "done"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(400), sampler=sampler, batch_size=20)
    collector = make_collector(
        counting,
        ones,
        replay_buffer=buffer,
        trajs_per_batch=2,
        rollout_length=3,
        frames_per_batch=30,
    )
    for _ in zip(range(5), collector, strict=False):
        pass
    slices = buffer.sample().reshape(4, 5)
    assert (slices["observation"][..., 0] == torch.arange(5)).all()


# -- staleness -----------------------------------------------------------------------------------


def test_stale_steps_are_left_out_by_torchrls_sampler(make_collector):
    sampler = StalenessAwareSampler(max_staleness=1)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), sampler=sampler, batch_size=64)
    net = torch.nn.Linear(4, 2)
    policy = TensorDictModule(lambda o: net(o).argmax(-1), ["observation"], ["action"])
    collector = make_collector("CartPole-v1", policy, replay_buffer=buffer)
    for _ in zip(range(4), collector, strict=False):
        collector.update_policy_weights_()
    sampler.consumer_version = 4
    versions = buffer.sample()["policy_version"]
    assert versions.unique().tolist() == [3]


# -- in the background ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multiprocess)])
def test_start_fills_the_buffer_while_the_caller_does_something_else(make_collector, num_workers):
    """TorchRL: test_start_single, test_start_multi, test_start_update_policy."""
    buffer = buffer_of()
    collector = make_collector("CartPole-v1", replay_buffer=buffer, num_workers=num_workers)
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


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multiprocess)])
def test_what_goes_wrong_in_the_background_is_raised_where_one_looks(make_collector, num_workers):
    buffer = buffer_of()
    collector = make_collector(
        EnvThatErrorsAfter10Iters, replay_buffer=buffer, num_workers=num_workers
    )
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
