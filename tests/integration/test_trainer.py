"""torchrl.trainers.Trainer on our collector: sync, async, its hooks and its checkpoints."""

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical as CategoricalDistribution
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, EGreedyModule, ProbabilisticActor, QValueActor, ValueOperator
from torchrl.objectives import ClipPPOLoss, DQNLoss
from torchrl.objectives.value import GAE
from torchrl.trainers import (
    BatchSubSampler,
    CountFramesLog,
    LogScalar,
    ReplayBufferTrainer,
    Trainer,
    UpdateWeights,
    UTDRHook,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:No target network updater"
)

FRAMES = 20


def policy_and_loss():
    net = MLP(4, 2, num_cells=[8], activation_class=nn.Tanh)
    policy = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=CategoricalDistribution,
        return_log_prob=True,
    )
    value = ValueOperator(MLP(4, 1, num_cells=[8]), in_keys=["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.95, value_network=value)
    return policy, ClipPPOLoss(policy, value), advantage


def make_trainer(collector, loss_module, total_frames, **options):
    return Trainer(
        collector=collector,
        total_frames=total_frames,
        frame_skip=1,
        loss_module=loss_module,
        optimizer=torch.optim.Adam(loss_module.parameters(), lr=1e-3),
        optim_steps_per_batch=2,
        progress_bar=False,
        **options,
    )


def on_policy_trainer(make_collector, total_frames=100, **options):
    policy, loss_module, advantage = policy_and_loss()
    collector = make_collector("CartPole-v1", policy, total_frames=10_000)
    trainer = make_trainer(collector, loss_module, total_frames, seed=3, **options)

    def add_advantage(batch):
        with torch.no_grad():
            return advantage(batch)

    trainer.register_op("batch_process", add_advantage)
    UpdateWeights(collector, 1).register(trainer)
    return trainer


def test_frames_are_counted_weights_change_and_versions_rise(make_collector):
    trainer = on_policy_trainer(make_collector)
    seen = []
    trainer.register_op("pre_steps_log", lambda batch: seen.append(batch["policy_version"]) or {})
    BatchSubSampler(batch_size=10, sub_traj_len=5).register(trainer)
    LogScalar(("next", "reward"), "reward", log_pbar=False).register(trainer)
    CountFramesLog(frame_skip=1).register(trainer)
    before = [parameter.clone() for parameter in trainer.loss_module.parameters()]
    trainer.train()
    assert trainer.collected_frames == 100
    assert [versions.unique().tolist() for versions in seen] == [[0], [1], [2], [3], [4]]
    after = list(trainer.loss_module.parameters())
    assert all((a != b).any() for a, b in zip(before, after, strict=True))
    assert trainer._log_dict["reward"][-1] == 1.0


def test_a_trainer_seeds_the_collector(make_collector):
    firsts = []
    for _ in range(2):
        trainer = on_policy_trainer(make_collector)
        firsts.append(next(iter(trainer.collector))["observation"][:2, 0])
    assert (firsts[0] == firsts[1]).all()


def test_a_checkpoint_is_taken_back_with_frames_and_version(make_collector, tmp_path):
    trainer = on_policy_trainer(
        make_collector, save_trainer_file=tmp_path / "trainer.pt", save_trainer_interval=40
    )
    trainer.train()
    other = on_policy_trainer(make_collector, total_frames=200)
    other.load_from_file(tmp_path / "trainer.pt")
    assert other.collected_frames == 100
    assert other.collector.policy_version == trainer.collector.policy_version
    assert other.collector.stats()["frames"] == 100
    for name, value in trainer.loss_module.state_dict().items():
        torch.testing.assert_close(other.loss_module.state_dict()[name], value)
    other.train()
    assert other.collected_frames == 200


def q_learning(make_collector, is_async, num_workers=0, total_frames=400, **options):
    spec = Categorical(2)
    value = QValueActor(MLP(4, 2, num_cells=[8]), in_keys=["observation"], spec=spec)
    policy = TensorDictSequential(value, EGreedyModule(spec))
    loss_module = DQNLoss(value, delay_value=True, action_space="categorical")
    loss_module.make_value_estimator(gamma=0.98)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5_000), batch_size=16)
    collector = make_collector(
        "CartPole-v1",
        policy,
        replay_buffer=buffer if is_async else None,
        total_frames=total_frames,
        num_workers=num_workers,
        init_random_frames=40,
    )
    trainer = make_trainer(
        collector, loss_module, total_frames, async_collection=is_async, **options
    )
    UpdateWeights(collector, 1, policy_weights_getter=lambda: policy).register(trainer)
    return trainer, buffer


def test_a_replay_buffer_of_the_trainers_own(make_collector):
    trainer, buffer = q_learning(make_collector, is_async=False)
    ReplayBufferTrainer(buffer, batch_size=16, flatten_tensordicts=True).register(trainer)
    trainer.train()
    assert len(buffer) == 400
    assert trainer._optim_count == 2 * (400 - 40 + FRAMES) // FRAMES


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.multiprocess)])
def test_async_collection_runs_to_its_end(make_collector, num_workers, tmp_path):
    trainer, buffer = q_learning(
        make_collector,
        is_async=True,
        num_workers=num_workers,
        total_frames=2_000,
        save_trainer_file=tmp_path / "trainer.pt",
        save_trainer_interval=200,
    )
    trainer.register_op("process_optim_batch", lambda _: buffer.sample())
    utd = UTDRHook(trainer)
    trainer.register_op("post_steps_log", utd)
    trainer.train()
    assert buffer.write_count >= 2_000
    assert not trainer.collector.is_running()
    assert trainer._optim_count > 0
    saved = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert 0 < saved["collector"]["frames"] <= 2_000


@pytest.mark.multiprocess
def test_whole_trajectories_go_into_the_buffer_of_an_async_trainer(make_collector):
    policy, loss_module, advantage = policy_and_loss()
    buffer = ReplayBuffer(storage=LazyTensorStorage(2_000), batch_size=16)
    collector = make_collector(
        "CartPole-v1",
        policy,
        replay_buffer=buffer,
        trajs_per_batch=2,
        total_frames=1_000,
        num_workers=1,
    )
    trainer = make_trainer(collector, loss_module, 600, async_collection=True)

    def sample(_):
        with torch.no_grad():
            return advantage(buffer[:50].clone())

    trainer.register_op("process_optim_batch", sample)
    trainer.train()
    done = buffer[:]["next", "done"]
    assert done[-1]
    assert buffer.write_count >= 600
