"""Your own environment and your own network: a corridor, and a torso with a skip connection."""

import os

import gymnasium
import lightning as L
import numpy as np
import torch
from torch import nn

from sf_torchrl import ActorCritic, APPOModule, RolloutDataModule, SharedMemoryCollector
from sf_torchrl.callbacks.progress import EnvStepsProgressBar
from sf_torchrl.config import LearnerConfig, NetworkConfig
from sf_torchrl.envs.try_out import try_out


class Corridor(gymnasium.Env):
    """Walk right to the end: 1 for arriving, -0.02 a step, cut short after 40 steps."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = int(self.np_random.integers(8)), 0
        return self._observe(), {}

    def step(self, action):
        self.place, self.steps = max(0, self.place + (1 if action else -1)), self.steps + 1
        arrived = self.place == 10
        return self._observe(), 1.0 if arrived else -0.02, arrived, self.steps == 40, {}

    def _observe(self):
        return np.array([self.place / 10, self.steps / 40], np.float32)


class SkipTorso(nn.Module):
    num_outputs = 32 + 2

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(2, 32)

    def forward(self, observations):
        (x,) = observations
        return torch.cat([torch.relu(self.hidden(x)), x], -1)


env_steps = int(os.environ.get("SF_TORCHRL_EXAMPLE_STEPS", 200_000))
L.seed_everything(0)
policy = ActorCritic(try_out(Corridor), NetworkConfig(normalize_input=False), torso=SkipTorso())
collector = SharedMemoryCollector(Corridor, policy, frames_per_batch=1024, total_frames=env_steps)
module = APPOModule(policy, learner=LearnerConfig(learning_rate=3e-3, learner_threads=1))
bar = EnvStepsProgressBar()
trainer = L.Trainer(max_epochs=-1, logger=False, enable_checkpointing=False, callbacks=[bar])
trainer.fit(module, RolloutDataModule(collector))
mean_return = collector.stats()["mean_return"]
print(f"mean return of the last 100 episodes: {mean_return:.2f} (best possible: 0.89)")
