"""What the collector promises to whoever iterates it, one promise a test."""

from functools import partial
from itertools import islice

import gymnasium
import numpy as np
import pytest
import torch
from envs import (
    BoxActionEnv,
    CountingDictEnv,
    CountingEnv,
    FaultyEnv,
    GraphEnv,
    Ledger,
    OldAPIEnv,
    OldStepEnv,
    WrongShapeEnv,
    pixels_of,
)
from policies import TellingPolicy
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.modules import ProbabilisticActor

from sf_torchrl import ActorCritic, SharedMemoryCollector

B, T = 4, 5


def same_bits(a, b):
    """Both batches have the same keys, shapes, dtypes and values."""
    keys = set(a.keys(include_nested=True, leaves_only=True))
    assert keys == set(b.keys(include_nested=True, leaves_only=True))
    return all(a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]) for key in keys)


def collected(collector, count):
    return list(islice(collector, count))


# -- a batch -------------------------------------------------------------------------------------


def test_a_batch_has_torchrls_keys_dtypes_and_shapes(make_collector):
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    (batch,) = collected(make_collector("CartPole-v1", policy), 1)
    flag = (torch.bool, (B, T, 1))
    expected = {
        "observation": (torch.float32, (B, T, 4)),
        "logits": (torch.float32, (B, T, 2)),
        "action": (torch.int64, (B, T)),
        "action_log_prob": (torch.float32, (B, T)),
        "state_value": (torch.float32, (B, T, 1)),
        "policy_version": (torch.int64, (B, T)),
        ("collector", "traj_ids"): (torch.int64, (B, T)),
        "done": flag,
        "terminated": flag,
        "truncated": flag,
        ("next", "observation"): (torch.float32, (B, T, 4)),
        ("next", "reward"): (torch.float32, (B, T, 1)),
        ("next", "done"): flag,
        ("next", "terminated"): flag,
        ("next", "truncated"): flag,
    }
    counted = {"is_init": flag, "step_count": (torch.int64, (B, T, 1))}
    counted["episode_reward"] = (torch.float32, (B, T, 1))
    expected |= counted | {("next", key): value for key, value in counted.items()}
    keys = batch.keys(include_nested=True, leaves_only=True)
    assert {key: (batch[key].dtype, tuple(batch[key].shape)) for key in keys} == expected


def test_a_batch_is_rollouts_by_time_contiguous_and_on_the_cpu(make_collector):
    (batch,) = collected(make_collector(CountingEnv), 1)
    assert batch.batch_size == (B, T)
    assert batch.names == [None, "time"]
    for key in batch.keys(include_nested=True, leaves_only=True):
        assert batch[key].is_contiguous(), key
        assert batch[key].device.type == "cpu"


def test_what_the_policy_says_of_a_step_is_what_it_says_of_its_observation(make_collector):
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    (batch,) = collected(make_collector("CartPole-v1", policy), 1)
    again = policy(batch.select("observation").clone())
    torch.testing.assert_close(batch["logits"], again["logits"])
    torch.testing.assert_close(batch["state_value"], again["state_value"])
    chosen = batch["logits"].log_softmax(-1).gather(-1, batch["action"][..., None]).squeeze(-1)
    torch.testing.assert_close(batch["action_log_prob"], chosen)


def test_no_step_begins_done(make_collector):
    for batch in collected(make_collector(partial(CountingEnv, length=3)), 3):
        assert batch["next", "done"].any()
        assert not (batch["done"] | batch["terminated"] | batch["truncated"]).any()


def test_a_batch_belongs_to_the_caller(make_collector):
    options = {"frames_per_batch": 10, "num_envs_per_worker": 2}
    spoiled, untouched = (
        make_collector(CountingEnv, **options),
        make_collector(CountingEnv, **options),
    )
    kept = []
    for mine, other in islice(zip(spoiled, untouched, strict=False), 6):
        assert same_bits(mine, other)
        kept.append((other, other.clone()))
        for key in mine.keys(include_nested=True, leaves_only=True):
            mine[key].fill_(1)
    assert all(same_bits(batch, as_it_was) for batch, as_it_was in kept)


# -- steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
@pytest.mark.parametrize(
    ("num_splits", "num_envs", "rollouts", "async_mode"),
    [(1, 2, 4, True), (2, 4, 4, False), (2, 4, 3, True), (3, 6, 5, True), (1, 3, 1, True)],
)
def test_every_step_of_every_batch_is_what_the_env_did(
    make_collector, num_splits, num_envs, rollouts, async_mode, ends
):
    collector = make_collector(
        partial(CountingEnv, length=(3, T, 12), ends=ends),
        num_splits=num_splits,
        num_envs_per_worker=num_envs,
        frames_per_batch=rollouts * T,
        async_mode=async_mode,
    )
    ledger = Ledger((3, T, 12), ends)
    for batch in collected(collector, 24):
        assert batch.batch_size == (rollouts, T)
        ledger.follow(batch)
    assert ledger.num_steps == 24 * rollouts * T
    assert len(ledger.seeds) == num_envs
    ledger.check_traj_ids()
    assert collector.stats()["episodes"] == len(ledger.episodes)
    recent = [(e.episode_return, e.length) for e in collector.recent_episodes()]
    assert sorted(recent) == sorted(ledger.episodes)
    returns, lengths = zip(*recent, strict=True)
    assert collector.stats()["mean_return"] == pytest.approx(np.mean(returns))
    assert collector.stats()["mean_length"] == pytest.approx(np.mean(lengths))


def test_only_the_last_hundred_episodes_are_kept(make_collector):
    collector = make_collector(partial(CountingEnv, length=1), frames_per_batch=150)
    collected(collector, 1)
    assert len(collector.recent_episodes()) == 100
    assert collector.stats()["episodes"] == 150


def test_before_an_episode_ends_there_is_no_mean_return(make_collector):
    collector = make_collector(partial(CountingEnv, ends="never"))
    collected(collector, 1)
    assert collector.stats()["episodes"] == 0
    assert "mean_return" not in collector.stats()


def test_an_env_that_overwrites_its_observation_is_no_trouble(make_collector):
    ledger = Ledger(3, "truncated")
    env = partial(CountingEnv, length=3, ends="truncated", reuse_buffer=True)
    for batch in collected(make_collector(env), 5):
        ledger.follow(batch)


def test_actions_count_from_zero_for_the_policy_and_from_start_for_the_env(make_collector):
    collector = make_collector(partial(CountingEnv, num_actions=3, first_action=1))
    ledger, actions = Ledger(first_action=1), set()
    for batch in collected(collector, 5):
        ledger.follow(batch)
        actions |= set(batch["action"].unique().tolist())
    assert actions == {0, 1, 2}


def test_every_key_of_a_dict_observation_is_a_key_of_the_batch(make_collector):
    env = partial(CountingDictEnv, length=4, ends="truncated")
    collector = make_collector(env, num_splits=2, frames_per_batch=30)
    ledger = Ledger(4, "truncated")
    for batch in collected(collector, 8):
        ledger.follow(batch, key="count")
        for part in (batch, batch["next"]):
            step = part["count"][..., 2].numpy()
            assert part["camera", "pixels"].dtype == torch.uint8
            assert part["speed"].shape == batch.batch_size
            np.testing.assert_array_equal(part["speed"].numpy(), np.float32(step / 2))
            np.testing.assert_array_equal(part["camera", "pixels"].numpy(), pixels_of(step))


def test_continuous_actions_are_clipped_for_the_env_alone(make_collector):
    policy = ActorCritic.for_env(BoxActionEnv, encoder_mlp_layers=(8,), initial_stddev=3.0)
    low, high = torch.tensor(BoxActionEnv.LOW), torch.tensor(BoxActionEnv.HIGH)
    for batch in collected(make_collector(BoxActionEnv, policy), 3):
        action = batch["action"]
        assert action.shape == (B, T, 2)
        assert ((action < low) | (action > high)).float().mean() > 0.2
        assert torch.equal(batch["next", "observation"], action.clamp(low, high))
        params = batch["action_params"]
        mean, log_stddev = params.chunk(2, -1)
        said = torch.distributions.Normal(mean, log_stddev.exp()).log_prob(action).sum(-1)
        torch.testing.assert_close(batch["action_log_prob"], said)


# -- policies ------------------------------------------------------------------------------------


def test_without_a_policy_actions_are_uniform(make_collector):
    env = partial(CountingEnv, num_actions=4)
    (batch,) = collected(make_collector(env, frames_per_batch=4000), 1)
    counts = batch["action"].flatten().bincount()
    assert len(counts) == 4
    assert ((counts - 1000).abs() < 150).all()  # 5 standard deviations
    assert "action_log_prob" not in batch.keys()  # noqa: SIM118 (a TensorDict)


def test_without_a_policy_continuous_actions_fill_their_bounds(make_collector):
    (batch,) = collected(make_collector(BoxActionEnv, frames_per_batch=1000), 1)
    low, high = (
        batch["action"].flatten(0, 1).min(0).values,
        batch["action"].flatten(0, 1).max(0).values,
    )
    torch.testing.assert_close(low, torch.tensor(BoxActionEnv.LOW), atol=0.1, rtol=0)
    torch.testing.assert_close(high, torch.tensor(BoxActionEnv.HIGH), atol=0.1, rtol=0)


def test_a_torchrl_actor_is_a_policy_and_all_it_says_is_kept(make_collector):
    network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    policy = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    batches = collected(make_collector("CartPole-v1", policy), 3)
    for batch in batches:
        logits = network(batch["observation"])
        torch.testing.assert_close(batch["logits"], logits)
        want = torch.distributions.Categorical(logits=logits).log_prob(batch["action"])
        torch.testing.assert_close(batch["action_log_prob"], want)
    assert torch.cat([batch["action"] for batch in batches]).unique().tolist() == [
        0,
        1,
    ]  # it samples


@pytest.mark.parametrize("kind", [InteractionType.MODE, InteractionType.DETERMINISTIC])
def test_the_mode_is_taken_where_it_is_asked_for(make_collector, kind):
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    for batch in collected(make_collector("CartPole-v1", policy, exploration_type=kind), 3):
        assert torch.equal(batch["action"], batch["logits"].argmax(-1))


def test_the_policy_given_is_never_changed_by_collecting(make_collector):
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,)).train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    collected(make_collector("CartPole-v1", policy), 3)
    assert all(torch.equal(before[name], t) for name, t in policy.state_dict().items())
    assert policy.training


# -- length and end ------------------------------------------------------------------------------


@pytest.mark.parametrize(("total_frames", "batches"), [(60, 3), (50, 3), (20, 1), (1, 1)])
def test_batches_end_once_total_frames_are_reached(make_collector, total_frames, batches):
    collector = make_collector(CountingEnv, total_frames=total_frames)
    assert len(collector) == batches
    assert len(list(collector)) == batches
    assert list(collector) == []
    assert collector.stats()["frames"] == 20 * batches
    assert collector.stats()["completed"]


def test_an_endless_collector_has_no_length(make_collector):
    with pytest.raises(TypeError, match="total_frames"):
        len(make_collector(CountingEnv))


def test_iterating_again_goes_on_where_it_stopped(make_collector):
    collector, ledger = make_collector(CountingEnv, total_frames=100), Ledger()
    for batch in [*collected(collector, 2), *collector]:
        ledger.follow(batch)
    assert ledger.num_steps == 100


def test_it_is_a_torchrl_collector(make_collector):
    collector = make_collector(CountingEnv, total_frames=60)
    assert isinstance(collector, BaseCollector)
    collected(collector, 2)
    stats = collector.stats()
    assert stats["frames"] == 40
    assert stats["batches"] == 2
    assert stats["total_frames"] == 60
    assert not stats["completed"]
    assert stats["requested_frames_per_batch"] == 20


def test_hooks_run_before_and_after_each_batch(make_collector):
    events = []

    def post(batch):
        events.append(("post", batch.batch_size))
        batch["mark"] = torch.full(batch.batch_size, len(events))

    collector = make_collector(
        CountingEnv, pre_collect_hook=lambda: events.append("pre"), post_collect_hook=post
    )
    for index, batch in enumerate(islice(collector, 3)):
        assert batch["mark"].unique().item() == 2 * (index + 1)
        assert events == ["pre", ("post", (B, T))] * (index + 1)


# -- seeds and state -----------------------------------------------------------------------------


def with_seed(make_collector, seed, **options):
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    with torch.no_grad():
        for index, parameter in enumerate(policy.parameters()):
            parameter.copy_(
                torch.linspace(-1, 1, parameter.numel()).cos().view_as(parameter) / (index + 1)
            )
    return make_collector("CartPole-v1", policy, seed=seed, num_splits=2, **options)


def test_one_seed_gives_the_same_bits_whatever_else_the_program_draws(make_collector):
    first, second = with_seed(make_collector, 7), with_seed(make_collector, 7)
    for index, (a, b) in enumerate(islice(zip(first, second, strict=False), 20)):
        assert same_bits(a, b)
        torch.manual_seed(index)  # between a batch of one and the next of the other
        torch.rand(index)
        np.random.default_rng().random()


def test_another_seed_gives_other_actions_and_other_episodes(make_collector):
    (a,), (b,) = (collected(with_seed(make_collector, seed), 1) for seed in (7, 8))
    assert not torch.equal(a["observation"][:, 0], b["observation"][:, 0])
    assert not torch.equal(a["action"], b["action"])


def test_collecting_draws_nothing_from_the_programs_generator(make_collector):
    collector = with_seed(make_collector, 7)
    state = torch.get_rng_state()
    collected(collector, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_seed_it_is_torchs(make_collector):
    torch.manual_seed(123)
    (a,) = collected(with_seed(make_collector, None), 1)
    (b,) = collected(with_seed(make_collector, 123), 1)
    assert same_bits(a, b)


def seeds_seen(collector):
    (batch,) = collected(collector, 1)
    return batch["observation"][..., 0].unique().tolist()


def test_every_env_has_a_seed_of_its_own_that_comes_from_the_runs(make_collector):
    options = {"num_envs_per_worker": 24, "num_splits": 3, "frames_per_batch": 24 * T}
    first, same, other = (
        seeds_seen(make_collector(CountingEnv, seed=seed, **options)) for seed in (1, 1, 2)
    )
    assert len(first) == 24
    assert first == same
    assert not set(first) & set(other)


def test_set_seed_is_the_seed_argument_given_later(make_collector):
    collector = make_collector(CountingEnv, seed=1)
    assert collector.set_seed(9) == 10
    assert collector.set_seed(9, static_seed=True) == 9
    assert seeds_seen(collector) == seeds_seen(make_collector(CountingEnv, seed=9))
    with pytest.raises(RuntimeError, match="before the collector starts"):
        collector.set_seed(3)


def test_state_goes_round_and_the_counters_go_on(make_collector):
    first = make_collector(CountingEnv, TellingPolicy(), total_frames=100)
    collected(first, 2)
    for _ in range(3):
        first.update_policy_weights_(first.policy)
    state = first.state_dict()
    second = make_collector(CountingEnv, TellingPolicy(), total_frames=100, seed=55)
    second.load_state_dict(state)
    assert second.policy_version == 3
    assert second.stats()["frames"] == 40
    assert second.stats()["episodes"] == first.stats()["episodes"] > 0
    rest = list(second)
    assert len(rest) == 3
    assert second.state_dict()["frames"] == 100
    assert second.state_dict()["iter"] == 4
    assert all((batch["policy_version"] == 3).all() for batch in rest)


def test_a_resumed_run_keeps_its_seed_but_repeats_no_episode(make_collector):
    first = make_collector(CountingEnv, seed=1)
    seen = set(seeds_seen(first))
    collector = first
    for _ in range(3):
        state = collector.state_dict()
        collector = make_collector(CountingEnv, seed=2)
        collector.load_state_dict(state)
        seen |= set(seeds_seen(collector))
        assert collector.state_dict()["seed"] == 1
    assert len(seen) == 4 * 2


def test_loading_state_restores_the_same_resumed_run_each_time(make_collector):
    state = make_collector(CountingEnv, seed=1).state_dict()
    resumed = [make_collector(CountingEnv, seed=2) for _ in range(2)]
    for collector in resumed:
        collector.load_state_dict(state)
    assert seeds_seen(resumed[0]) == seeds_seen(resumed[1])


def test_state_cannot_be_loaded_once_it_runs(make_collector):
    collector = make_collector(CountingEnv)
    collected(collector, 1)
    with pytest.raises(RuntimeError, match="before the collector starts"):
        collector.load_state_dict(collector.state_dict())


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda policy: policy, id="module"),
        pytest.param(TensorDict.from_module, id="TensorDict"),
        pytest.param(lambda policy: policy.state_dict(), id="state dict"),
    ],
)
def test_new_weights_reach_the_next_actions_and_raise_the_version_by_one(make_collector, form):
    collector = make_collector(CountingEnv, TellingPolicy(), async_mode=False)
    for version, batch in enumerate(islice(collector, 5)):
        assert collector.policy_version == version
        assert (batch["policy_version"] == version).all()
        assert (batch["told"] == version).all()
        assert (batch["action"] == version % 2).all()
        collector.update_policy_weights_(form(TellingPolicy().become(version + 1)))


def test_without_an_argument_the_weights_of_the_policy_given_are_published(make_collector):
    policy = TellingPolicy()
    collector = make_collector(CountingEnv, policy)
    policy.become(5)
    (before,) = collected(collector, 1)
    assert (before["told"] == 0).all()
    collector.update_policy_weights_()
    (after,) = collected(collector, 1)
    assert (after["told"] == 5).all()
    assert (after["policy_version"] == 1).all()


def test_weights_that_do_not_fit_are_refused_and_the_version_stays(make_collector):
    collector = make_collector(CountingEnv, TellingPolicy())
    with pytest.raises(ValueError, match="weights lack"):
        collector.update_policy_weights_({"weight": torch.zeros(3)})
    assert collector.policy_version == 0


# -- what is refused, before any process starts --------------------------------------------------


def raising():
    raise FileNotFoundError("no ROM")


def writes(*out_keys, value=None):
    """A policy that writes the same for every env."""

    def forward(observation):
        first = torch.zeros(len(observation), dtype=torch.int64) if value is None else value
        return (first, *[observation] * (len(out_keys) - 1))

    return TensorDictModule(forward, in_keys=["observation"], out_keys=list(out_keys))


@pytest.mark.parametrize(
    ("create_env_fn", "message"),
    [
        ("NoSuchEnv-v0", r"cannot make env id 'NoSuchEnv-v0'.*doesn't exist"),
        ("CartPole-v99", r"cannot make env id 'CartPole-v99'"),
        ("no_such_module:env", "there is no module 'no_such_module'"),
        (GraphEnv, r"observation space 'observation' is Graph.*supported: Box"),
        (OldAPIEnv, "'OldAPIEnv' uses the Gym API from before 0.26"),
        (OldStepEnv, "its step returned a tuple of 4"),
        (WrongShapeEnv, r"shape \(3,\), its observation_space says \(4,\)"),
        (lambda: gymnasium.make_vec("CartPole-v1", num_envs=2), "has autoreset mode NEXT_STEP"),
        (lambda: None, "made None, which is neither a gymnasium nor a TorchRL env"),
        (raising, "making env 'raising' raised FileNotFoundError: no ROM"),
        (partial(FaultyEnv, "raise", where="reset", at=0), "reset of env .*RuntimeError.*on fire"),
        (partial(FaultyEnv, "raise", where="step", at=0), "step of env .*RuntimeError.*on fire"),
    ],
)
def test_an_env_that_cannot_be_used_is_refused(family, create_env_fn, message):
    with pytest.raises(ValueError, match=message):
        SharedMemoryCollector(create_env_fn, frames_per_batch=1024)
    assert family.members() == {}


@pytest.mark.parametrize(
    "create_env_fn", [raising, partial(FaultyEnv, "raise", where="reset", at=0)]
)
def test_the_envs_own_exception_is_kept_as_the_cause(create_env_fn):
    with pytest.raises(ValueError, match="raised") as caught:
        SharedMemoryCollector(create_env_fn, frames_per_batch=1024)
    assert isinstance(caught.value.__cause__, (FileNotFoundError, RuntimeError))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (nn.Linear(4, 2), "policy Linear fails on a TensorDict of the observations of env"),
        (writes("logits"), r"policy writes \['logits'\], but no 'action'"),
        (
            TensorDictModule(nn.Identity(), in_keys=["pixels"], out_keys=["action"]),
            r"policy reads \['pixels'\]; env 'CountingEnv' observes \['observation'\]",
        ),
        (writes("action", value=torch.zeros(2, 2)), "takes one integer action.*float32.*one-hot"),
        (writes("action", value=torch.zeros(2)), "takes one integer action"),
    ],
)
def test_a_policy_that_does_not_fit_the_env_is_refused(family, policy, message):
    with pytest.raises(ValueError, match=message):
        SharedMemoryCollector(CountingEnv, policy, frames_per_batch=1024)
    assert family.members() == {}


def test_a_continuous_action_of_another_shape_is_refused():
    policy = writes("action", value=torch.zeros(2, 3))
    with pytest.raises(
        ValueError,
        match=r"takes action of shape \(2,\) and .* writes torch.float32 of shape \(3,\)",
    ):
        SharedMemoryCollector(BoxActionEnv, policy, frames_per_batch=1024)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs_per_worker": 3, "num_splits": 2}, "num_splits=2 must divide"),
        ({"frames_per_batch": 33}, "frames_per_batch=33 must be a multiple of rollout_length=32"),
        (
            {"frames_per_batch": 32, "async_mode": False},
            r"multiple of num_envs\*rollout_length=512",
        ),
        ({"num_workers": -1}, "num_workers=-1 must not be negative"),
        ({"num_envs_per_worker": 0}, "num_envs_per_worker=0 must be at least 1"),
        ({"rollout_length": 0}, "rollout_length=0 must be at least 1"),
        ({"frames_per_batch": 0}, "frames_per_batch=0 must be at least 1"),
        ({"max_batches_in_flight": 0}, "max_batches_in_flight=0 must be at least 1"),
        ({"env_start_timeout_s": 0.0}, r"env_start_timeout_s=0\.0 must be positive"),
        ({"total_frames": 0}, "total_frames=0 must be positive"),
        ({"total_frames": -2}, "total_frames=-2 must be positive"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        SharedMemoryCollector(CountingEnv, **{"frames_per_batch": 1024, **options})
    assert family.members() == {}


def test_an_error_of_an_env_in_the_main_process_is_the_envs_own(make_collector):
    collector = make_collector(partial(FaultyEnv, "raise", at=7))
    with pytest.raises(RuntimeError, match="on fire"):
        collected(collector, 2)
    with pytest.raises(RuntimeError, match="has been shut down"):
        collected(collector, 1)
