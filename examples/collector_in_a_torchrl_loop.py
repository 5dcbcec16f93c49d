"""The collector in a hand-written TorchRL loop: TorchRL's loss and advantage, no Lightning."""

import os

import torch
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from sf_torchrl import SharedMemoryCollector

env_steps = int(os.environ.get("SF_TORCHRL_EXAMPLE_STEPS", 300_000))
torch.manual_seed(0)
torch.set_num_threads(1)


def mlp(num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)
    )


actor = ProbabilisticActor(
    TensorDictSequential(TensorDictModule(mlp(2), ["observation"], ["logits"])),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
critic = ValueOperator(mlp(1), in_keys=["observation"])
advantage = GAE(gamma=0.98, lmbda=0.95, value_network=critic, average_gae=True)
loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
optimizer = torch.optim.Adam(loss_module.parameters(), lr=2e-3)

collector = SharedMemoryCollector(
    "CartPole-v1", actor, frames_per_batch=2048, total_frames=env_steps, num_envs_per_worker=16
)
for batch in collector:
    with torch.no_grad():
        advantage(batch)
    flat = batch.reshape(-1)
    for rows in torch.randint(len(flat), (16, 512)):
        losses = loss_module(flat[rows])
        optimizer.zero_grad()
        sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
        nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
        optimizer.step()
    collector.update_policy_weights_(actor)
    stats = collector.stats()
    if stats["batches"] % 20 == 0 and "mean_return" in stats:
        print(f"{stats['frames']:,} env steps: mean return {stats['mean_return']:.1f}")
collector.shutdown()
