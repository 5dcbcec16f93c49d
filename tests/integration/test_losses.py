"""TorchRL's losses on our batches: what they need is there, and they learn from it."""

from functools import partial

import pytest
import torch
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical as CategoricalDistribution
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer
from torchrl.modules import (
    MLP,
    EGreedyModule,
    NormalParamExtractor,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import A2CLoss, ClipPPOLoss, DQNLoss, SACLoss, SoftUpdate
from torchrl.objectives.value import GAE, VTrace

from sf_torchrl import SharedMemoryCollector

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:No target network updater"
)


def actor(num_cells=32):
    net = MLP(4, 2, num_cells=[num_cells], activation_class=nn.Tanh)
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=CategoricalDistribution,
        return_log_prob=True,
    )


def critic(num_cells=32):
    net = MLP(4, 1, num_cells=[num_cells], activation_class=nn.Tanh)
    return ValueOperator(net, in_keys=["observation"])


def step(losses, optimizer):
    """One optimizer step on the sum of the losses, all of which are finite."""
    total = sum(value for key, value in losses.items() if key.startswith("loss"))
    assert torch.isfinite(total)
    optimizer.zero_grad()
    total.backward()
    optimizer.step()


def mean_return(collector):
    return collector.stats()["mean_return"]


def on_policy(make_collector, loss_module, advantage, policy, env_steps, passes):
    """Mean return after so many env steps."""
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=3e-3)
    collector = make_collector(
        "CartPole-v1",
        policy,
        num_envs_per_worker=16,
        rollout_length=32,
        frames_per_batch=1024,
        total_frames=env_steps,
    )
    for count, batch in enumerate(collector):
        assert (batch["policy_version"] == count).all()
        with torch.no_grad():
            advantage(batch)
        flat = batch.reshape(-1)
        for rows in torch.randint(len(flat), (passes, 512)):
            step(loss_module(flat[rows]), optimizer)
        collector.update_policy_weights_(policy)
    return mean_return(collector)


def test_ppo_with_gae_learns(make_collector):
    torch.manual_seed(0)
    policy, value = actor(), critic()
    advantage = GAE(gamma=0.98, lmbda=0.95, value_network=value, average_gae=True)
    loss_module = ClipPPOLoss(policy, value, entropy_coeff=0.0)
    assert on_policy(make_collector, loss_module, advantage, policy, 40_000, passes=8) > 100


def test_a2c_with_vtrace_learns(make_collector):
    torch.manual_seed(0)
    policy, value = actor(), critic()
    advantage = VTrace(gamma=0.98, actor_network=policy, value_network=value, average_adv=True)
    loss_module = A2CLoss(policy, value, entropy_coeff=0.0)
    assert on_policy(make_collector, loss_module, advantage, policy, 60_000, passes=2) > 60


def test_dqn_learns_from_a_buffer_that_the_collector_fills(make_collector):
    torch.manual_seed(0)
    spec = Categorical(2)
    value = QValueActor(MLP(4, 2, num_cells=[64]), in_keys=["observation"], spec=spec)
    exploration = EGreedyModule(spec, eps_init=1.0, eps_end=0.02, annealing_num_steps=5_000)
    policy = TensorDictSequential(value, exploration)
    loss_module = DQNLoss(value, delay_value=True, action_space="categorical")
    loss_module.make_value_estimator(gamma=0.98)
    target = SoftUpdate(loss_module, tau=0.02)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(20_000), batch_size=128)
    collector = make_collector(
        "CartPole-v1",
        policy,
        replay_buffer=buffer,
        num_envs_per_worker=8,
        rollout_length=8,
        frames_per_batch=128,
        total_frames=14_000,
        init_random_frames=512,
    )
    for _ in collector:
        if collector.stats().get("mean_return", 0) > 60:  # of the last hundred episodes
            break
        for _ in range(32):
            step(loss_module(buffer.sample()), optimizer)
            target.step()
        exploration.step(128)
        collector.update_policy_weights_()
    assert mean_return(collector) > 60


def sac_parts():
    net = nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
    policy = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        default_interaction_type=InteractionType.RANDOM,
    )
    value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation", "action"])
    loss_module = SACLoss(policy, value, num_qvalue_nets=2, target_entropy=-1.0)
    loss_module.make_value_estimator(gamma=0.98)
    return policy, loss_module, SoftUpdate(loss_module, tau=0.01)


@pytest.mark.slow
@pytest.mark.learning
def test_sac_solves_pendulum(make_collector):
    """A mean return above -250 over the last episodes; see examples/torchrl_sac.py."""
    torch.manual_seed(1)
    policy, loss_module, target = sac_parts()
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=128)
    collector = make_collector(
        "Pendulum-v1",
        policy,
        replay_buffer=buffer,
        num_envs_per_worker=4,
        rollout_length=10,
        frames_per_batch=40,
        total_frames=5_600,
        init_random_frames=800,
    )
    for _ in collector:
        if collector.stats()["frames"] <= 800:
            continue
        for _ in range(40):
            step(loss_module(buffer.sample()), optimizer)
            target.step()
        collector.update_policy_weights_(policy)
    last = [episode.episode_return for episode in collector.recent_episodes()[-8:]]
    assert sum(last) / len(last) > -250


def test_sac_takes_a_step_on_what_is_in_the_buffer(make_collector):
    policy, loss_module, target = sac_parts()
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=32)
    collector = make_collector("Pendulum-v1", policy, replay_buffer=buffer, total_frames=40)
    before = [parameter.clone() for parameter in policy.parameters()]
    for _ in collector:
        step(loss_module(buffer.sample()), optimizer)
        target.step()
    assert all((a != b).any() for a, b in zip(before, policy.parameters(), strict=True))


@pytest.mark.multiprocess
def test_worker_processes_feed_a_loss_while_its_policy_is_renewed(make_collector):
    policy, value = actor(), critic()
    advantage = GAE(gamma=0.98, lmbda=0.95, value_network=value)
    loss_module = ClipPPOLoss(policy, value)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    make = partial(SharedMemoryCollector, "CartPole-v1", policy)
    collector = make(frames_per_batch=256, total_frames=10_240, num_workers=1)
    versions = []
    for batch in collector:
        versions.append(int(batch["policy_version"].max()))
        with torch.no_grad():
            advantage(batch)
        step(loss_module(batch), optimizer)
        collector.update_policy_weights_()
    collector.shutdown()
    assert versions == sorted(versions)
    assert versions[-1] > 10
