"""What TorchRL's own tests ask of a collector's batches, hooks and reports, asked of ours."""

import json
import os
from functools import partial

import envs
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import BaseCollector
from torchrl.envs import ExcludeTransform, GymEnv, StepCounter, TransformedEnv
from torchrl.testing.mocking_classes import (
    CountingEnv,
    CountingEnvWithString,
    EnvThatErrorsAfter10Iters,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

counting = partial(CountingEnv, max_steps=4)


def ones(td):
    """An env that counts its actions then counts its steps: episodes of five."""
    return td.set("action", torch.ones(*td.batch_size, 1, dtype=torch.int32))


def test_it_is_a_collector_of_torchrls(make_collector):
    assert isinstance(make_collector(counting, ones), BaseCollector)


def test_the_first_observations_are_those_of_a_reset(make_collector):
    """TorchRL: test_initial_obs_consistency, test_collector_env_reset."""
    collector = make_collector(counting, ones, num_envs_per_worker=3, frames_per_batch=15)
    batch = next(iter(collector))
    assert (batch["observation"][:, 0] == 0).all()
    following = batch["next", "observation"][:, :-1][~batch["next", "done"][:, :-1, 0]]
    assert (following == batch["observation"][:, 1:][~batch["next", "done"][:, :-1, 0]]).all()


def test_trajectories_have_the_lengths_of_their_episodes(make_collector):
    """TorchRL: test_traj_len_consistency."""
    lengths = []
    for frames, rollout in ((20, 5), (40, 10), (60, 15)):
        collector = make_collector(
            counting, ones, num_envs_per_worker=1, rollout_length=rollout, frames_per_batch=frames
        )
        flat = next(iter(collector)).reshape(-1)
        _, count = flat["collector", "traj_ids"].unique_consecutive(return_counts=True)
        lengths.append(count[:4].tolist())
    assert lengths == [[5, 5, 5, 5]] * 3


def test_batches_cover_total_frames_and_no_more(make_collector):
    """TorchRL: test_collector_batch_size, test_no_stopiteration."""
    collector = make_collector(counting, ones, total_frames=50, frames_per_batch=20)
    assert len(collector) == 3
    assert [batch.numel() for batch in collector] == [20, 20, 20]
    assert collector.stats()["completed"]


def test_next_gives_batches_and_then_none(make_collector):
    """TorchRL: test_collector_next_method."""
    collector = make_collector(counting, ones, total_frames=40)
    assert collector.next().batch_size == (4, 5)
    assert collector.next() is not None
    assert collector.next() is None


def test_yielded_batches_are_the_callers(make_collector):
    """TorchRL: clones before it yields."""
    first, second, third = (
        batch for _, batch in zip(range(3), make_collector(counting, ones), strict=False)
    )
    kept = first.clone()
    second.zero_()
    third.zero_()
    assert (first == kept).all()


def test_private_keys_are_left_out(make_collector):
    """TorchRL: test_excluded_keys."""

    def act(tensordict):
        action = torch.ones(*tensordict.batch_size, 1, dtype=torch.int32)
        hidden = torch.zeros(tensordict.batch_size)
        return tensordict.set("action", action).set("_hidden", hidden).set("shown", hidden)

    batch = next(iter(make_collector(counting, act)))
    assert "shown" in batch
    assert "_hidden" not in batch


def test_compact_obs_leaves_out_what_next_repeats(make_collector):
    """TorchRL: test_compact_obs_drops_next_obs."""
    full, compact = (
        next(iter(make_collector("CartPole-v1", compact_obs=flag))) for flag in (False, True)
    )
    assert ("next", "observation") in full.keys(include_nested=True)
    assert set(compact["next"].keys()) == {"reward", "done", "terminated", "truncated"}
    assert (full["observation"] == compact["observation"]).all()


def test_set_truncated_marks_the_end_of_every_rollout(make_collector):
    """TorchRL: test_set_truncated."""
    batch = next(iter(make_collector("CartPole-v1", set_truncated=True)))
    assert batch["next", "truncated"][:, -1].all()
    assert batch["next", "done"][:, -1].all()
    assert not batch["next", "truncated"][:, :-1].any()


def test_split_trajs_gives_a_trajectory_a_row(make_collector):
    """TorchRL: test_split_trajs."""
    collector = make_collector(
        counting, ones, split_trajs=True, rollout_length=20, frames_per_batch=80
    )
    batch = next(iter(collector))
    assert batch.shape == (16, 5)
    assert batch["collector", "mask"].sum() == 80
    assert (batch["collector", "traj_ids"] == batch["collector", "traj_ids"][:, :1]).all()


def test_postproc_has_the_last_word(make_collector):
    """TorchRL: test_collector_postproc_zeros."""
    collector = make_collector(counting, ones, postproc=lambda batch: batch.reshape(-1).zero_())
    batch = next(iter(collector))
    assert batch.shape == (20,)
    assert (batch["observation"] == 0).all()


def test_keys_can_be_left_out(make_collector):
    """TorchRL: test_collector_without_traj_ids."""
    collector = make_collector(counting, ones, track_traj_ids=False, track_policy_version=False)
    batch = next(iter(collector))
    assert not {"collector", "policy_version"} & set(batch.keys())


def test_batches_go_to_the_storing_device(make_collector):
    batch = next(iter(make_collector(counting, ones, storing_device="meta")))
    assert batch.device == torch.device("meta")


def test_a_fake_batch_looks_like_a_real_one(make_collector):
    for make in ("CartPole-v1", counting):
        collector = make_collector(make, set_truncated=make is not counting)
        fake, real = collector.fake_tensordict(), next(iter(collector))
        assert fake.batch_size == real.batch_size
        assert fake.names == real.names
        for key, value in real.items(include_nested=True, leaves_only=True):
            assert fake.get(key).shape == value.shape
            assert fake.get(key).dtype == value.dtype


def test_a_reloaded_collector_goes_on_counting_with_the_same_weights(make_collector):
    """TorchRL: test_collector_reloading."""
    policy = TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["scores"])
    acting = TensorDictModule(lambda scores: scores.argmax(-1), ["scores"], ["action"])
    first = make_collector("CartPole-v1", torch_sequential(policy, acting))
    batches = iter(first)
    next(batches)
    first.update_policy_weights_()
    next(batches)
    state = first.state_dict()
    other = torch_sequential(
        TensorDictModule(torch.nn.Linear(4, 2), ["observation"], ["scores"]), acting
    )
    second = make_collector("CartPole-v1", other)
    second.load_state_dict(state)
    assert (second._frames, second._iter, second.policy_version) == (40, 1, 1)
    batch = next(iter(second))
    with torch.no_grad():
        expected = policy.module(batch["observation"])
    torch.testing.assert_close(batch["scores"], expected)


def torch_sequential(*modules):
    from tensordict.nn import TensorDictSequential

    return TensorDictSequential(*modules)


def test_an_env_that_errors_ends_the_iteration_with_its_error(make_collector):
    """TorchRL: test_env_that_errors. In a worker process: see test_background."""
    collector = make_collector(EnvThatErrorsAfter10Iters)
    with pytest.raises(RuntimeError, match="max steps"):
        for _ in zip(range(10), collector, strict=False):
            pass


def test_init_random_frames_come_first(make_collector):
    """TorchRL: test_init_random_frames_with_start."""

    def still(observation):
        return torch.zeros(observation.shape[0], 1)

    collector = make_collector(
        "Pendulum-v1", still, init_random_frames=40, num_envs_per_worker=2, frames_per_batch=20
    )
    batches = [batch for _, batch in zip(range(4), collector, strict=False)]
    assert all((batch["action"] != 0).all() for batch in batches[:2])
    assert all((batch["action"] == 0).all() for batch in batches[2:])
    assert collector.init_random_frames == 40


def test_random_frames_are_not_repeated_after_a_reload(make_collector):
    def still(observation):
        return torch.zeros(observation.shape[0], 1)

    first = make_collector("Pendulum-v1", still, init_random_frames=20)
    next(iter(first))
    second = make_collector("Pendulum-v1", still, init_random_frames=20)
    second.load_state_dict(first.state_dict())
    assert (next(iter(second))["action"] == 0).all()


def test_one_env_gives_ids_of_the_same_shape(make_collector):
    """TorchRL: test_unbatched_env_traj_ids_shape_consistency."""
    for num_envs in (1, 2):
        batch = next(iter(make_collector(counting, ones, num_envs_per_worker=num_envs)))
        assert batch["collector", "traj_ids"].shape == batch.batch_size == (4, 5)


def test_the_shorter_of_two_time_limits_holds(make_collector):
    """TorchRL refuses a second one: test_maxframes_error."""

    def limited():
        return TransformedEnv(CountingEnv(max_steps=30), StepCounter(3))

    for limit, length in ((2, 2), (10, 3)):
        collector = make_collector(limited, ones, max_frames_per_traj=limit, rollout_length=10)
        batch = next(iter(collector))
        assert batch["next", "truncated"].squeeze(-1)[0].nonzero()[0] == length - 1
        assert batch["next", "observation"].max() == length


def test_what_is_no_tensor_is_refused_and_can_be_left_out(make_collector):
    """TorchRL: TestCollectorsNonTensor."""

    def without():
        return TransformedEnv(CountingEnvWithString(max_steps=4), ExcludeTransform("string"))

    with pytest.raises(ValueError, match=r"'string'.*ExcludeTransform"):
        make_collector(CountingEnvWithString, ones)
    assert "string" not in next(iter(make_collector(without, ones)))


# -- hooks and reports ---------------------------------------------------------------------------


def test_hooks_see_every_batch(make_collector):
    """TorchRL: TestCollectHooks."""
    seen = []
    collector = make_collector(
        counting,
        ones,
        total_frames=60,
        pre_collect_hook=lambda: seen.append("before"),
        post_collect_hook=lambda batch: seen.append(tuple(batch.shape)),
    )
    assert len(list(collector)) == 3
    assert seen == ["before", (4, 5)] * 3


def test_hooks_can_be_set_and_their_errors_come_through(make_collector):
    collector = make_collector(counting, ones)
    assert collector.pre_collect_hook is collector.post_collect_hook is None

    def fail(batch):
        raise RuntimeError("no such metric")

    collector.set_post_collect_hook(fail)
    with pytest.raises(RuntimeError, match="no such metric"):
        next(iter(collector))


def test_stats_are_plain_values(make_collector):
    """TorchRL: TestCollectorStats."""
    collector = make_collector(counting, ones, total_frames=60)
    assert collector.stats()["frames"] == 0
    next(iter(collector))
    stats = collector.stats()
    assert json.loads(json.dumps(stats)) == stats
    assert (stats["frames"], stats["batches"], stats["total_frames"]) == (20, 1, 60)
    assert (stats["policy_version"], stats["path"]) == (0, "generic")


def test_methods_and_attributes_can_be_reached_by_name(make_collector):
    """TorchRL: TestCollectorRemoteHelpers."""
    collector = make_collector(counting, ones)
    collector.map_fn("increment_version", [(), ()])
    assert collector.get_distant_attr("policy_version") == 2
    assert collector.get_model("policy") is collector.policy
    assert collector.getattr_policy("out_keys") == ["action"]
    assert collector.cascade_execute("get_policy_version") == 2


def test_shutting_down_twice_or_before_a_start_is_silent(make_collector):
    """TorchRL: test_shutdown_idempotent."""
    for started in (False, True):
        collector = make_collector(counting, ones)
        if started:
            next(iter(collector))
        collector.shutdown()
        collector.shutdown(timeout=1.0, close_env=True, raise_on_error=False)
        with pytest.raises(RuntimeError, match="shut down"):
            next(iter(collector))


def test_set_seed_makes_two_collectors_equal(make_collector):
    """TorchRL: test_concurrent_collector_seed."""
    batches = []
    for seed in (3, 3, 4):
        collector = make_collector(partial(GymEnv, "CartPole-v1"), seed=None)
        assert isinstance(collector.set_seed(seed), int)
        batches.append(next(iter(collector)))
    same, again, other = batches
    assert isinstance(same, TensorDict)
    assert (same == again).all()
    assert (same["observation"] != other["observation"]).any()


@pytest.mark.multiprocess
def test_two_workers_share_neither_ids_nor_hooks(make_collector):
    """TorchRL: test_unique_traj_sync, test_multiprocess_collector_stats,
    test_hooks_run_in_multiprocess_workers: ours run where the batch is read."""
    seen = []
    collector = make_collector(
        [envs.CountingEnv, partial(envs.CountingEnv, length=5)],  # free of torch: start at once
        num_workers=2,
        num_envs_per_worker=2,
        frames_per_batch=40,
        total_frames=120,
        async_mode=False,
        pre_collect_hook=lambda: seen.append(os.getpid()),
        post_collect_hook=lambda batch: seen.append(batch.shape),
    )
    batches = list(collector)
    assert seen == [os.getpid(), (8, 5)] * 3
    ids = torch.cat([batch["collector", "traj_ids"] for batch in batches])
    assert (ids == ids[:, :1]).all()  # an episode is as long as a rollout
    assert len(ids[:, 0].unique()) == len(ids)
    stats = collector.stats()
    assert (stats["frames"], stats["episodes"], stats["completed"]) == (120, 24, True)
    assert json.loads(json.dumps(stats)) == stats
