"""Two costs by themselves: an action's round trip, and what a batch costs beyond its copy.

python -m benchmarks.micro
"""

import statistics
import time
import warnings

import gymnasium
import numpy as np
import torch

from benchmarks import machine
from sf_torchrl import ActorCritic, SharedMemoryCollector
from sf_torchrl.memory.batch import BatchAssembler
from sf_torchrl.memory.slab import Slab


class Still(gymnasium.Env):
    """An env that costs next to nothing."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self._observation = np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        return self._observation, {}

    def step(self, action):
        return self._observation, 0.0, False, False, {}


def round_trip_us(seconds: float = 3.0) -> tuple[float, float]:
    """Microseconds from request to action, and of a whole step; one env in one worker."""
    policy = ActorCritic.for_env(Still, encoder_mlp_layers=(64,), normalize_input=False)
    collector = SharedMemoryCollector(
        Still,
        policy,
        frames_per_batch=1024,
        rollout_length=128,
        num_workers=1,
        num_envs_per_worker=1,
        num_splits=1,
    )
    batches = iter(collector)
    next(batches)
    waited = collector.stats()["env_workers_waited_s"]
    steps, began, now = 0, time.perf_counter(), 0.0
    while now - began < seconds:
        steps += next(batches).numel()
        now = time.perf_counter()
    waited = collector.stats()["env_workers_waited_s"] - waited
    collector.shutdown()
    return waited / steps * 1e6, (now - began) / steps * 1e6


def assembly_ms(repeat: int = 50) -> tuple[float, float]:
    """Milliseconds of a batch of 256 x 32 of CartPole, and of copying as many bytes at once."""
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(64, 64))
    collector = SharedMemoryCollector(
        "CartPole-v1", policy, frames_per_batch=256 * 32, num_envs_per_worker=128
    )
    slab = Slab(collector._layout())
    slab.numpy("env", "ended")[:, :, 9::20] = True  # an episode ends every 20 steps
    assembler = BatchAssembler(slab, 256)
    whole, copies = [], []
    for _ in range(repeat):
        began = time.perf_counter()
        for slot in range(4):
            assembler.add(slot, 0, 64)
        batch = assembler.finish()
        assembler.start()
        whole.append(time.perf_counter() - began)
        leaves = list(batch.values(True, True))
        began = time.perf_counter()
        _ = [torch.empty_like(leaf).copy_(leaf) for leaf in leaves]
        copies.append(time.perf_counter() - began)
    collector.shutdown()
    return statistics.median(whole) * 1e3, statistics.median(copies) * 1e3


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print(f"{machine.describe()}; load before: {machine.load():.1f}; commit {machine.commit()}")
    trips, steps = (
        sorted(found) for found in zip(*(round_trip_us() for _ in range(3)), strict=True)
    )
    print(f"request to action, one lane: {trips[1]:.0f} us ({trips[0]:.0f} to {trips[2]:.0f})")
    print(f"whole step, one lane: {steps[1]:.0f} us ({steps[0]:.0f} to {steps[2]:.0f})")
    whole, copy = assembly_ms()
    print(f"batch of 256 x 32: {whole:.2f} ms, of which copying its bytes {copy:.2f} ms")


if __name__ == "__main__":
    main()
