"""Train CartPole with a plain Lightning Trainer."""

import os

import lightning as L

from sf_torchrl import ActorCritic, APPOModule, RolloutDataModule, SharedMemoryCollector
from sf_torchrl.callbacks.checkpoints import EnvStepCheckpoint
from sf_torchrl.callbacks.progress import EnvStepsProgressBar
from sf_torchrl.config import LearnerConfig, LossConfig

env_steps = int(os.environ.get("SF_TORCHRL_EXAMPLE_STEPS", 500_000))
L.seed_everything(0)

policy = ActorCritic.for_env(
    "CartPole-v1", encoder_mlp_layers=(64, 64), nonlinearity="tanh", normalize_input=False
)
collector = SharedMemoryCollector(
    "CartPole-v1",
    policy,
    frames_per_batch=2048,
    total_frames=env_steps,
    num_workers=2,
    num_envs_per_worker=32,
)
module = APPOModule(
    policy,
    loss=LossConfig(reward_scale=0.1, exploration_loss_coeff=0.0),
    learner=LearnerConfig(learning_rate=3e-3, ppo_epochs=2, learner_threads=1),
)
trainer = L.Trainer(
    max_epochs=-1,
    default_root_dir="runs/example",
    accelerator="cpu",
    callbacks=[EnvStepsProgressBar(), EnvStepCheckpoint()],
    enable_model_summary=False,
)
trainer.fit(module, RolloutDataModule(collector))
print(f"mean return of the last 100 episodes: {collector.stats()['mean_return']:.1f}")
