"""Replay buffers and whole trajectories, as TorchRL fills them."""

from functools import partial

import pytest
import torch
from tensordict.nn import TensorDictModule
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SliceSampler,
    StalenessAwareSampler,
    TensorDictReplayBuffer,
)
from torchrl.testing.mocking_classes import CountingEnv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

counting = partial(CountingEnv, max_steps=4)


def ones(td):
    """An env that counts its actions then counts its steps: episodes of five."""
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int32))


def buffer_of(size=1000, ndim=1, **kwargs):
    return ReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), batch_size=8, **kwargs)


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


def test_a_two_dimensional_buffer_keeps_the_envs_of_its_batches_side_by_side(make_collector):
    """So that slices of it are of one env."""
    sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"))
    buffer = ReplayBuffer(storage=LazyTensorStorage(400, ndim=2), sampler=sampler, batch_size=40)
    collector = make_collector(counting, ones, replay_buffer=buffer, num_envs_per_worker=4)
    for _ in zip(range(4), collector, strict=False):
        pass
    slices = buffer.sample().reshape(10, 4)
    assert (slices["observation"].squeeze(-1).diff(dim=1) == 1).all()


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage, ListStorage])
def test_any_buffer_and_storage_of_steps_will_do(make_collector, kind, storage):
    buffer = kind(storage=storage(400), batch_size=8, collate_fn=torch.stack)
    for _ in zip(range(2), make_collector(counting, ones, replay_buffer=buffer), strict=False):
        pass
    assert len(buffer) == 40
    assert buffer.sample()["observation"].shape == (8, 1)


def test_the_buffer_gets_what_postproc_makes_of_a_batch(make_collector):
    """TorchRL: test_collector_postproc_zeros, with a buffer."""
    buffer = buffer_of()
    collector = make_collector(
        counting, ones, replay_buffer=buffer, postproc=lambda batch: batch.reshape(-1)[:7].zero_()
    )
    next(iter(collector))
    assert (buffer[:]["next", "observation"] == torch.zeros(7, 1)).all()


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


class Noting(ReplayBuffer):
    """Knows how long its writes were."""

    def extend(self, data, **kwargs):
        self.writes = [*getattr(self, "writes", []), len(data)]
        return super().extend(data, **kwargs)


@pytest.mark.parametrize(("trajs_per_write", "writes"), [(None, [20, 20]), (3, [15, 5, 15, 5])])
def test_so_many_trajectories_are_written_at_once(make_collector, trajs_per_write, writes):
    buffer = Noting(storage=LazyTensorStorage(400), batch_size=8)
    collector = make_collector(
        counting,
        ones,
        replay_buffer=buffer,
        trajs_per_batch=4,
        trajs_per_write=trajs_per_write,
        total_frames=40,
    )
    assert list(collector) == [None, None]
    assert buffer.writes == writes


@pytest.mark.parametrize(("ndim", "arguments"), [(1, {"traj_format": "padded"}), (2, {})])
def test_what_trajectories_in_a_buffer_cannot_be_is_refused(make_collector, ndim, arguments):
    """They are rows of steps without padding."""
    with pytest.raises(ValueError, match=f"traj_format|ndim={ndim}"):
        make_collector(
            counting, ones, trajs_per_batch=2, replay_buffer=buffer_of(ndim=ndim), **arguments
        )


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
