"""Recurrent actor-critics: one pass over rollouts says what stepping through them says."""

from functools import partial

import gymnasium
import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, InitTracker, TransformedEnv

from sf_torchrl import ActorCritic, APPOLoss, SharedMemoryCollector
from sf_torchrl.algorithms.stretches import cut_into_stretches
from sf_torchrl.config import LossConfig
from sf_torchrl.evaluation import evaluate_policy
from sf_torchrl.memory.batch import INITIAL_STATE

SMALL = {"encoder_mlp_layers": (16,), "rnn_size": 8}
CORES = {
    "gru": {"core": "gru"},
    "lstm": {"core": "lstm"},
    "gru, 2 layers": {"core": "gru", "rnn_num_layers": 2},
    "lstm, 3 layers": {"core": "lstm", "rnn_num_layers": 3},
    "gru, two towers": {"core": "gru", "actor_critic_share_weights": False},
    "lstm, two towers": {"core": "lstm", "actor_critic_share_weights": False},
}
EVERY_CORE = pytest.mark.parametrize("core", CORES.values(), ids=CORES.keys())


def recurrent(core, env="CartPole-v1"):
    torch.manual_seed(0)
    return ActorCritic.for_env(env, **SMALL, **core)


def rollouts(B=7, T=9):
    """Observations, their followers, where episodes begin: at 0, in the middle and at T-1 too."""
    observation, following = torch.randn(B, T, 4), torch.randn(B, T, 4)
    done = torch.rand(B, T) < 0.15
    done[0, 0] = done[1, T // 2] = done[2, T - 1] = True
    done[3] = False
    done[4] = True
    begins = torch.cat([torch.rand(B, 1) < 0.3, done[:, :-1]], 1)
    return observation, following, done, begins


def stepped(policy, observation, following, begins, state):
    """The same, one step of every rollout at a time."""
    params, values, next_values = [], [], []
    for t in range(observation.shape[1]):
        state = torch.where(begins[:, t : t + 1], 0.0, state)
        param, _, _, value, after = policy.network.act([observation[:, t]], False, state)
        _, _, _, next_value, _ = policy.network.act([following[:, t]], False, after)
        params.append(param)
        values.append(value[:, 0])
        next_values.append(next_value[:, 0])
        state = after
    return (torch.stack(part, 1) for part in (params, values, next_values))


@EVERY_CORE
def test_one_pass_over_rollouts_equals_stepping_through_them(core):
    policy = recurrent(core)
    observation, following, done, begins = rollouts()
    state = torch.randn(len(observation), policy.state.shape[0])
    start = torch.where(begins[:, :1], 0.0, state)
    needed = done.clone()
    needed[:, -1] = True
    cut = cut_into_stretches(begins, None)
    rows = torch.cat([observation.flatten(0, 1), following[needed]])
    with torch.no_grad():
        params, value = policy.evaluate_rollouts([rows], cut, cut.of_row[needed.flatten()], start)
        expected = stepped(policy, observation, following, begins, state)
    expected_params, expected_value, expected_next = expected
    count = observation.shape[0] * observation.shape[1]
    close = {"atol": 1e-6, "rtol": 0}
    torch.testing.assert_close(params[:count], expected_params.flatten(0, 1), **close)
    torch.testing.assert_close(value[:count], expected_value.flatten(), **close)
    torch.testing.assert_close(value[count:], expected_next[needed], **close)


@EVERY_CORE
def test_gradients_of_one_pass_are_those_of_stepping(core):
    policy = recurrent(core)
    observation, following, _, begins = rollouts()
    state = torch.where(begins[:, :1], 0.0, torch.randn(len(observation), policy.state.shape[0]))
    cut = cut_into_stretches(begins, None)
    none = torch.zeros(0, dtype=torch.int64)
    params, value = policy.evaluate_rollouts([observation.flatten(0, 1)], cut, none, state)
    (params.square().sum() + value.square().sum()).backward()
    found = {name: p.grad.clone() for name, p in policy.named_parameters()}
    policy.zero_grad()
    params, value, _ = stepped(policy, observation, following, begins, state)
    (params.square().sum() + value.square().sum()).backward()
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-5, rtol=1e-4)


# No episode outlasts 6 steps and no pole falls sooner: episodes end and begin where we know.
SHORT_EPISODES = partial(gymnasium.make, "CartPole-v1", max_episode_steps=6)


def collected(policy, num_workers=0, batches=4, **settings):
    collector = SharedMemoryCollector(
        SHORT_EPISODES,
        policy,
        **{
            "frames_per_batch": 4 * 16,
            "num_workers": num_workers,
            "num_envs_per_worker": 4 // max(1, num_workers),
            "rollout_length": 16,
            "async_mode": False,
            "seed": 0,
            **settings,
        },
    )
    source = iter(collector)
    found = [next(source) for _ in range(batches)]
    collector.shutdown()
    return found


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.multiprocess)], ids=["serial", "processes"]
)
@pytest.mark.parametrize("core", [CORES["gru"], CORES["lstm, two towers"]], ids=["gru", "lstm"])
def test_a_batch_has_the_state_in_which_each_rollout_began(core, num_workers):
    policy = recurrent(core)
    first, *later = collected(policy, num_workers, batches=12)
    assert not first[INITIAL_STATE].any()
    state, reached = first[INITIAL_STATE][:, 0], first
    for batch in later:
        with torch.no_grad():
            for t in range(reached.shape[1]):
                state = torch.where(reached["is_init"][:, t], 0.0, state)
                state = policy.network.act([reached["observation"][:, t]], False, state)[-1]
        # Rollouts of one env follow each other: its trajectory ids are equal modulo the envs.
        came_from = reached["collector", "traj_ids"][:, -1] % 4
        goes_to = batch["collector", "traj_ids"][:, 0] % 4
        state = state[came_from.argsort()][goes_to.argsort().argsort()]
        state = torch.where(batch["is_init"][:, 0], 0.0, state)
        torch.testing.assert_close(batch[INITIAL_STATE][:, 0], state, atol=1e-6, rtol=0)
        assert (batch[INITIAL_STATE] == batch[INITIAL_STATE][:, :1]).all()
        reached = batch
    assert any(batch["is_init"][:, 0].any() for batch in later)
    assert any(batch[INITIAL_STATE].any() for batch in later)


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(2, marks=pytest.mark.multiprocess)], ids=["serial", "processes"]
)
@EVERY_CORE
def test_at_zero_lag_every_ratio_is_one(core, num_workers):
    policy = recurrent(core)
    for batch in collected(policy, num_workers, batches=3):
        assert APPOLoss(policy)(batch)["ratio_deviation_max"] < 1e-5
    assert batch["next", "done"].any()


@pytest.mark.parametrize("core", [CORES["gru"], CORES["lstm"]], ids=["gru", "lstm"])
def test_after_masked_steps_the_ratio_is_one_still(core):
    """Steps whose state is unknown are left out, not guessed."""
    policy = recurrent(core)
    (*_, batch) = collected(policy)
    batch["mask"] = torch.rand(batch.shape) < 0.8
    loss = APPOLoss(policy, LossConfig(with_vtrace=False))
    found = loss(batch)
    assert found["ratio_deviation_max"] < 1e-5
    assert 0 < found["fresh_fraction"] < batch["mask"].float().mean()


@pytest.mark.parametrize("core", [CORES["gru"], CORES["lstm"]], ids=["gru", "lstm"])
def test_batches_of_torchrls_own_collector_train_a_recurrent_policy(core):
    policy = recurrent(core)
    env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    env.append_transform(policy.make_tensordict_primer())
    collector = Collector(
        env, policy, frames_per_batch=60, total_frames=180, auto_register_policy_transforms=False
    )
    for batch in collector:
        loss = APPOLoss(policy)(batch.unsqueeze(0))
        assert loss["ratio_deviation_max"] < 1e-5
    assert batch["recurrent_state"].any()
    collector.shutdown()


def test_a_policy_without_core_asks_torchrl_for_no_state():
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(16,))
    assert "recurrent_state" not in policy.in_keys
    env = TransformedEnv(GymEnv("CartPole-v1"), InitTracker())
    collector = Collector(env, policy, frames_per_batch=20, total_frames=20)
    (batch,) = collector
    assert "recurrent_state" not in batch.keys()  # noqa: SIM118
    collector.shutdown()


def test_the_state_takes_no_memory_in_a_batch():
    (batch,) = collected(recurrent(CORES["gru"]), batches=1)
    assert batch[INITIAL_STATE].stride(1) == 0
    assert "recurrent_state" not in batch.keys()  # noqa: SIM118


def test_the_state_stays_where_trajectory_ids_are_not_wanted():
    policy = recurrent(CORES["gru"])
    (batch,) = collected(policy, batches=1, track_traj_ids=False)
    assert set(batch["collector"].keys()) == {"initial_state"}
    assert APPOLoss(policy)(batch)["ratio_deviation_max"] < 1e-5


def test_evaluation_carries_the_state_and_begins_each_episode_without():
    """A policy that acts by its state alone: the evaluation must give it the right one."""
    policy = recurrent(CORES["gru"])
    one = evaluate_policy(policy, "CartPole-v1", 6, num_envs=1, seed=3)
    seen = []

    class Told(torch.nn.Module):
        in_keys, out_keys = policy.in_keys, policy.out_keys
        make_tensordict_primer = policy.make_tensordict_primer

        def __init__(self):
            super().__init__()
            self.policy = policy

        def forward(self, tensordict):
            if tensordict.numel() == 1:
                seen.append(tensordict["recurrent_state"].abs().sum().item())
            return self.policy(tensordict)

    again = evaluate_policy(Told(), "CartPole-v1", 6, num_envs=1, seed=3)
    assert again == one
    assert sum(total == 0.0 for total in seen) == 6
    assert len(seen) == sum(episode.length for episode in one.episodes)


def test_a_core_has_no_place_in_a_torso_of_ones_own():
    torso = torch.nn.Linear(4, 8)
    torso.num_outputs = 8
    specs = recurrent({}).specs
    from sf_torchrl.config import NetworkConfig

    with pytest.raises(ValueError, match="core='gru' has no place"):
        ActorCritic(specs, NetworkConfig(core="gru"), torso=torso)


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
def test_a_batch_without_a_fresh_step_is_no_error(with_vtrace):
    policy = recurrent(CORES["gru"])
    (batch,) = collected(policy, batches=1)
    batch["mask"] = torch.zeros(batch.shape, dtype=torch.bool)
    loss = APPOLoss(policy, LossConfig(with_vtrace=with_vtrace))
    if not with_vtrace:
        loss.returns(batch)
        assert not batch["advantage"].any()
    assert loss(batch)["fresh_fraction"] == 0


def test_a_missing_state_is_one_line():
    policy = recurrent(CORES["gru"])
    (batch,) = collected(policy, batches=1)
    del batch["collector"]
    with pytest.raises(ValueError, match="the batch has neither"):
        APPOLoss(policy)(batch)
    with pytest.raises(ValueError, match="make_tensordict_primer"):
        policy(batch.select("observation"))


def test_an_env_with_the_policys_primer_gives_no_second_state():
    policy = recurrent(CORES["gru"])

    def make():
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        env = TransformedEnv(env, InitTracker())
        return env.append_transform(policy.make_tensordict_primer())

    collector = SharedMemoryCollector(
        make, policy, frames_per_batch=32, num_workers=0, num_envs_per_worker=2, rollout_length=16
    )
    batch = next(iter(collector))
    collector.shutdown()
    assert "recurrent_state" not in batch.keys()  # noqa: SIM118
    assert APPOLoss(policy)(batch)["ratio_deviation_max"] < 1e-5
