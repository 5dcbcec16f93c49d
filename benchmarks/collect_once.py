"""One collector sampling in a fresh process: prints one JSON object as its last line.

python -m benchmarks.collect_once --system NAME --env raw|counted|transformed|vectorized --seconds S

The same policy (TorchRL's ProbabilisticActor on two layers of 64 tanh units) and the same envs for
every system.
"""

import argparse
import functools
import json
import time
import warnings

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import (
    Compose,
    GymEnv,
    GymWrapper,
    InitTracker,
    ObservationNorm,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
)
from torchrl.modules import ProbabilisticActor

from benchmarks import machine


def raw_env():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def counted_env():
    """The three transforms that almost every TorchRL script has."""
    return TransformedEnv(raw_env(), Compose(InitTracker(), StepCounter(), RewardSum()))


def transformed_env():
    """Three transforms that change what is observed, earned and when an episode ends."""
    return TransformedEnv(
        raw_env(),
        Compose(
            ObservationNorm(loc=0.0, scale=1.0, in_keys=["observation"]),
            RewardScaling(loc=0.0, scale=0.1),
            StepCounter(max_steps=500),
        ),
    )


def gymnasium_vector_env(count):
    makers = [functools.partial(gymnasium.make, "CartPole-v1")] * count
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)


def vectorized_env(count):
    return GymWrapper(gymnasium_vector_env(count), categorical_action_encoding=True)


def gymnasium_env():
    return gymnasium.make("CartPole-v1")


TORCHRL_ENVS = {
    "raw": raw_env,
    "counted": counted_env,
    "transformed": transformed_env,
    "vectorized": vectorized_env,
}
OUR_ENVS = {
    "raw": gymnasium_env,
    "counted": counted_env,
    "transformed": transformed_env,
    "vectorized": gymnasium_vector_env,
}


def make_policy():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    return ProbabilisticActor(
        TensorDictModule(nn.Sequential(network, nn.Linear(64, 2)), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def several(make, count):
    """``count`` envs as one, in series."""
    return make() if count == 1 else SerialEnv(count, make)


def ours(env, workers, envs, batch, splits=2, rollout=32):
    from sf_torchrl import SharedMemoryCollector

    return SharedMemoryCollector(
        OUR_ENVS[env],
        make_policy(),
        frames_per_batch=batch,
        num_workers=workers,
        num_envs_per_worker=envs,
        num_splits=splits,
        rollout_length=rollout,
    )


def torchrl_single(env, envs, batch):
    from torchrl.collectors import Collector

    return Collector(several(TORCHRL_ENVS[env], envs), make_policy(), frames_per_batch=batch)


def torchrl_multi(env, workers, envs, batch, sync):
    from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

    make = functools.partial(several, TORCHRL_ENVS[env], envs)
    kind = MultiSyncCollector if sync else MultiAsyncCollector
    return kind(
        [make] * workers,
        make_policy(),
        frames_per_batch=batch,
        num_threads=1,
        num_sub_threads=1,
    )


def torchrl_async_batched(env, envs, batch, envs_per_worker=1, slots=False, chunk="auto"):
    from torchrl.collectors import AsyncBatchedCollector

    options = {}
    if slots:  # env processes that reach an inference process directly
        options = {"policy_factory": make_policy, "transport": "auto"}
        options["transition_chunk_size"] = chunk
    else:
        options = {"policy": make_policy(), "transport": "driver", "env_exchange": "shm"}
        options["envs_per_worker"] = envs_per_worker
    return AsyncBatchedCollector(
        [TORCHRL_ENVS[env]] * envs,
        frames_per_batch=batch,
        env_backend="multiprocessing",
        **options,
    )


SYSTEMS = {
    "ours": ours,
    "single": torchrl_single,
    "multi": torchrl_multi,
    "async_batched": torchrl_async_batched,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--env", choices=OUR_ENVS, required=True)
    parser.add_argument("--options", type=json.loads, default={}, help="JSON")
    parser.add_argument("--at_once", type=int, default=32, help="envs of a vectorized env")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--warmup_s", type=float, default=2.0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for makers in (OUR_ENVS, TORCHRL_ENVS):
        makers["vectorized"] = functools.partial(makers["vectorized"], arguments.at_once)
    collector = SYSTEMS[arguments.system](arguments.env, **arguments.options)
    steps, first, begun = 0, None, None
    for batch in collector:
        now = time.perf_counter()
        if first is None:
            first = now
        if begun is None and now - first >= arguments.warmup_s:
            begun, steps = now, 0
        elif begun is not None:
            steps += batch.numel()
            if now - begun >= arguments.seconds:
                break
    found = {"env_steps_per_s": steps / (time.perf_counter() - begun)}
    found["first_batch_s"] = machine.seconds_since_process_start() - (time.perf_counter() - first)
    print(json.dumps(found), flush=True)
    collector.shutdown()


if __name__ == "__main__":
    main()
