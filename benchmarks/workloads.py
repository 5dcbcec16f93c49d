"""What is run: an env, a network and the sizes that suit them on two cores."""

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from sf_torchrl.envs.factory import with_arguments


@dataclass(frozen=True)
class Workload:
    env: str
    frame_skip: int
    network: dict[str, Any]
    collector: dict[str, Any] = field(default_factory=dict)
    env_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def env_fn(self):
        return with_arguments(self.env, self.env_kwargs)

    learner: dict[str, Any] = field(default_factory=dict)


PIXELS = {
    "num_workers": 2,
    "num_envs_per_worker": 16,
    "num_splits": 2,
    "rollout_length": 32,
    "frames_per_batch": 1024,
}


class NoOpEnv(gymnasium.Env):
    """A fixed picture; episodes of 1000 steps."""

    def __init__(self, size: int = 84) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (4, size, size), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4)
        self._picture = np.random.default_rng(0).integers(0, 256, (4, size, size), np.uint8)
        self._steps = 0

    def reset(self, *, seed=None, options=None):
        self._steps = 0
        return self._picture, {}

    def step(self, action):
        self._steps += 1
        return self._picture, 0.0, False, self._steps >= 1000, {}


WORKLOADS = {
    # MLP 2x64, batch 2048, rollout 32, one epoch: the sizes that the peers are given too.
    "cartpole": Workload(
        env="CartPole-v1",
        frame_skip=1,
        network={
            "encoder_mlp_layers": (64, 64),
            "nonlinearity": "tanh",
            "normalize_input": False,
        },
        collector={
            "num_workers": 2,
            "num_envs_per_worker": 256,
            "num_splits": 2,
            "rollout_length": 32,
            "frames_per_batch": 2048,
        },
        learner={"learning_rate": 1e-3, "learner_threads": 1},
    ),
    # convnet_simple + 512 on 3x72x128, batch 1024.
    "doom": Workload(
        env="doom_basic",
        frame_skip=4,
        network={"encoder_conv_architecture": "convnet_simple", "nonlinearity": "relu"},
        collector=PIXELS | {"num_envs_per_worker": 8},
        env_kwargs={"channel_order": "first"},
    ),
    # Nature CNN + 512 on 4x84x84, batch 1024.
    "atari": Workload(
        env="atari_breakout",
        frame_skip=4,
        network={"encoder_conv_architecture": "convnet_atari", "nonlinearity": "relu"},
        collector=PIXELS,
    ),
    # The same without an env's cost: the cores that env workers leave go to the learner.
    "synth": Workload(
        env="benchmarks.workloads:NoOpEnv",
        frame_skip=1,
        network={"encoder_conv_architecture": "convnet_atari", "nonlinearity": "relu"},
        collector=PIXELS,
        learner={"learner_threads": 2},
    ),
}
