"""What is run: an env, a network and the sizes that suit them on two cores."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Workload:
    env: str
    frame_skip: int
    network: dict[str, Any]
    collector: dict[str, Any] = field(default_factory=dict)
    learner: dict[str, Any] = field(default_factory=dict)


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
}
