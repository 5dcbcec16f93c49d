"""torchrl.trainers.Trainer on the collector: DQN on CartPole.

With ``--async`` the collector fills the replay buffer in the background while the trainer learns.
"""

import os
import sys
import time

import torch
from tensordict.nn import TensorDictSequential
from torchrl.data import Categorical, LazyTensorStorage, ReplayBuffer
from torchrl.modules import MLP, EGreedyModule, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate
from torchrl.trainers import ReplayBufferTrainer, TargetNetUpdaterHook, Trainer, UpdateWeights

from sf_torchrl import SharedMemoryCollector

is_async = "--async" in sys.argv
env_steps = int(os.environ.get("SF_TORCHRL_EXAMPLE_STEPS", 400_000 if is_async else 40_000))
torch.manual_seed(0)
torch.set_num_threads(1)

spec = Categorical(2)
value = QValueActor(MLP(4, 2, num_cells=[64, 64]), in_keys=["observation"], spec=spec)
exploration = EGreedyModule(spec, eps_init=1.0, eps_end=0.02, annealing_num_steps=env_steps // 4)
policy = TensorDictSequential(value, exploration)
loss_module = DQNLoss(value, delay_value=True, action_space="categorical")
loss_module.make_value_estimator(gamma=0.98)
target_updater = SoftUpdate(loss_module, tau=0.01)

buffer = ReplayBuffer(storage=LazyTensorStorage(env_steps), batch_size=256)
collector = SharedMemoryCollector(
    "CartPole-v1",
    policy,
    replay_buffer=buffer if is_async else None,
    frames_per_batch=256,
    rollout_length=16,
    total_frames=env_steps,
    init_random_frames=1024,
    num_workers=1,
    num_envs_per_worker=16,
    async_mode=is_async,
)
trainer = Trainer(
    collector=collector,
    total_frames=env_steps,
    frame_skip=1,
    loss_module=loss_module,
    optimizer=torch.optim.Adam(loss_module.parameters(), lr=1e-3),
    optim_steps_per_batch=64,
    async_collection=is_async,
    progress_bar=False,
    seed=0,
)
if is_async:
    trainer.register_op("process_optim_batch", lambda _: buffer.sample())
else:
    ReplayBufferTrainer(buffer, batch_size=256, flatten_tensordicts=True).register(trainer)
trainer.register_op("post_optim", TargetNetUpdaterHook(target_updater))
UpdateWeights(collector, 1, policy_weights_getter=lambda: policy).register(trainer)
began = told = time.monotonic()


def after_a_batch() -> None:
    """Explore less, and tell every two seconds."""
    global told
    exploration.eps.fill_(max(0.02, 1.0 - 4 * trainer.collected_frames / env_steps))
    stats, now = collector.stats(), time.monotonic()
    if now - told > 2 and "mean_return" in stats:
        told = now
        print(f"{stats['frames']:,} env steps, {now - began:.0f} s: {stats['mean_return']:.0f}")


trainer.register_op("post_steps", after_a_batch)
trainer.train()
