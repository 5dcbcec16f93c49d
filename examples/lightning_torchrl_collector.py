"""The other way round: TorchRL's collectors under Lightning, with our learner.

``--multi`` takes MultiAsyncCollector, whose steps are older than the policy; V-trace corrects them.
"""

import os
import sys
from functools import partial

import lightning as L
import torch
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs import GymEnv, SerialEnv

from sf_torchrl import ActorCritic, APPOModule, RolloutDataModule
from sf_torchrl.config import LearnerConfig, LossConfig

NUM_ENVS, T = 16, 32


def make_env():
    """Sixteen CartPoles as one TorchRL env."""
    return SerialEnv(NUM_ENVS, partial(GymEnv, "CartPole-v1", categorical_action_encoding=True))


class Report(L.Callback):
    """Prints the mean length of the episodes in a batch: the return, on CartPole."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Every twentieth batch."""
        if batch_idx % 20 == 0:
            length = batch.numel() / max(int(batch["next", "done"].sum()), 1)
            print(f"{pl_module.env_steps:,} env steps: {length:.0f} steps an episode")


def main():
    """Half a minute."""
    torch.set_num_threads(1)
    L.seed_everything(0)
    env_steps = int(os.environ.get("SF_TORCHRL_EXAMPLE_STEPS", 200_000))
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(64, 64), nonlinearity="tanh")
    options = {"frames_per_batch": NUM_ENVS * T, "total_frames": env_steps}
    if "--multi" in sys.argv:
        collector = MultiAsyncCollector([make_env] * 2, policy, num_threads=1, **options)
    else:
        collector = Collector(make_env(), policy, **options)
    module = APPOModule(
        policy,
        loss=LossConfig(gamma=0.98, exploration_loss_coeff=0.0),
        learner=LearnerConfig(learning_rate=1e-3, ppo_epochs=2),
    )
    trainer = L.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[Report()],
    )
    trainer.fit(module, RolloutDataModule(collector))


if __name__ == "__main__":  # MultiAsyncCollector's processes import this file
    main()
