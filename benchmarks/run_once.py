"""One measurement in a fresh process: prints one JSON object as its last line.

python -m benchmarks.run_once --workload cartpole --mode sim|sample|train --seconds S
"""

import sys

if "train" in sys.argv or "sample" in sys.argv:
    # As the command line does: the inference worker imports torch while this process does.
    from sf_torchrl.workers.supervisor import prewarm_inference_worker

    prewarm_inference_worker()

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
import time
import warnings

from benchmarks import machine
from benchmarks.workloads import WORKLOADS, Workload


def simulate(workload: Workload, seconds: float, collector: dict) -> dict[str, float]:
    """Env steps/s of as many processes as there are env workers, random actions, nothing else."""
    context = multiprocessing.get_context("spawn")
    count = max(collector["num_workers"], 1)
    with context.Pool(count) as pool:
        jobs = [(workload.env_fn, collector["num_envs_per_worker"], seconds)] * count
        rates = pool.starmap(step_randomly, jobs)
    return {"env_steps_per_s": sum(rates)}


def step_randomly(env_fn, num_envs: int, seconds: float) -> float:
    """Env steps/s of this process."""
    from sf_torchrl.envs.factory import make_env

    envs = [make_env(env_fn) for _ in range(num_envs)]
    for seed, env in enumerate(envs):
        env.reset(seed=seed)
        env.action_space.seed(seed)
    actions = [envs[0].action_space.sample() for _ in range(997)]
    steps, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for env in envs:
            _, _, terminated, truncated, _ = env.step(actions[steps % 997])
            steps += 1
            if terminated or truncated:
                env.reset()
    return steps / (time.perf_counter() - began)


class Rate:
    """Env steps/s between the end of the warm-up and the last mark."""

    def __init__(self, seconds: float, warmup_s: float) -> None:
        self.seconds, self.warmup_s = seconds, warmup_s
        self.first_batch_s = 0.0
        self._first = self._begin = self._end = (0.0, 0)

    def mark(self, env_steps: int) -> bool:
        """Note the steps so far; True when enough has been seen."""
        now = (time.perf_counter(), env_steps)
        if not self.first_batch_s:
            self.first_batch_s = machine.seconds_since_process_start()
            self._first = now
        if now[0] - self._first[0] < self.warmup_s:
            self._begin = now
        self._end = now
        return now[0] - self._first[0] >= self.warmup_s + self.seconds

    @property
    def env_steps_per_s(self) -> float:
        return (self._end[1] - self._begin[1]) / (self._end[0] - self._begin[0])


def learn(
    workload: Workload, rate: Rate, collector: dict, train: bool, device: str
) -> dict[str, float]:
    """Sampling only, or full training with the callbacks and loggers of the command line."""
    from sf_torchrl import ActorCritic, SharedMemoryCollector

    meter = machine.MemoryMeter()
    policy = ActorCritic.for_env(workload.env_fn, **workload.network)
    source = SharedMemoryCollector(
        workload.env_fn, policy, seed=0, policy_device=device, **collector
    )
    if train:
        _train(workload, policy, source, rate, device)
    else:
        for batch in source:
            if rate.mark(source.stats()["frames"]):
                break
            del batch
    meter.sample()
    stats = source.stats()
    source.shutdown()
    return {
        "env_steps_per_s": rate.env_steps_per_s,
        "pss_mb": meter.stop(),
        "first_batch_s": rate.first_batch_s,
        "mean_return": stats.get("mean_return", float("nan")),
    }


def _train(workload, policy, source, rate, device) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from sf_torchrl import APPOModule, RolloutDataModule
    from sf_torchrl.callbacks.progress import EnvStepsProgressBar
    from sf_torchrl.callbacks.reports import StatsReporter
    from sf_torchrl.config import LearnerConfig

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if rate.mark(pl_module.env_steps):
                trainer.should_stop = True

    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            max_epochs=-1,
            accelerator="cpu" if device == "cpu" else "gpu",
            devices=1,
            default_root_dir=directory,
            logger=CSVLogger(directory),
            enable_checkpointing=False,
            enable_model_summary=False,
            callbacks=[StatsReporter(), EnvStepsProgressBar(), Watch()],
        )
        module = APPOModule(policy, learner=LearnerConfig(**workload.learner))
        trainer.fit(module, RolloutDataModule(source, frame_skip=workload.frame_skip))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--mode", choices=("sim", "sample", "train"), required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warmup_s", type=float, default=3.0)
    parser.add_argument("--collector", type=json.loads, default={}, help="JSON, over the workload")
    parser.add_argument("--learner", type=json.loads, default={}, help="JSON, over the workload")
    parser.add_argument("--network", type=json.loads, default={}, help="JSON, over the workload")
    parser.add_argument("--env_kwargs", type=json.loads, default={}, help="JSON, over the workload")
    parser.add_argument("--device", default="cpu", help="of inference worker and learner")
    parser.add_argument(
        "--env_from", help="a folder whose common.make_env(workload) makes the peers' env"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning.*")
    workload = WORKLOADS[arguments.workload]
    workload = dataclasses.replace(
        workload,
        network=workload.network | arguments.network,
        learner=workload.learner | arguments.learner,
        env_kwargs=workload.env_kwargs | arguments.env_kwargs,
    )
    if arguments.env_from:
        sys.path.insert(0, arguments.env_from)
        workload = dataclasses.replace(
            workload, env="common:make_env", env_kwargs={"workload": arguments.workload}
        )
    collector = workload.collector | arguments.collector
    if arguments.mode == "sim":
        found = simulate(workload, arguments.seconds, collector)
    else:
        import torch

        torch.set_num_threads(1)
        rate = Rate(arguments.seconds, arguments.warmup_s)
        found = learn(
            workload, rate, collector, train=arguments.mode == "train", device=arguments.device
        )
    found["env_frames_per_s"] = found["env_steps_per_s"] * workload.frame_skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
