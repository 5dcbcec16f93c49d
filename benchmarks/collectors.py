"""Sampling beside TorchRL's collectors: same policy, same envs, turn by turn in one run.

python -m benchmarks.collectors --repeat 3 --seconds 5 --output benchmarks/results/NAME.md
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine


@dataclass(frozen=True)
class Run:
    """One collector on one kind of env."""

    name: str
    system: str
    options: dict = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    def measure(self, env: str, seconds: float) -> float:
        """Env steps/s; NaN where it does not come to an end."""
        command = [sys.executable, "-m", "benchmarks.collect_once", "--system", self.system]
        command += ["--env", env, "--options", json.dumps(self.options), *self.flags]
        command += ["--seconds", str(seconds)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=180,
                check=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            print(f"{self.name}: {error}", flush=True)
            return float("nan")
        return json.loads(done.stdout.splitlines()[-1])["env_steps_per_s"]


def ours(envs: int, batch: int = 4096) -> Run:
    options = {"workers": 2, "envs": envs, "batch": batch}
    return Run(f"sf_torchrl, 2 workers of {envs} envs", "ours", options)


def multi(envs: int, sync: bool = False) -> Run:
    name = "MultiSyncCollector" if sync else "MultiAsyncCollector"
    options = {"workers": 2, "envs": envs, "batch": 4096, "sync": sync}
    return Run(f"TorchRL {name}, 2 workers of {envs} envs", "multi", options)


def grouped(per_worker: int) -> Run:
    options = {"envs": 2 * per_worker, "batch": 1024, "envs_per_worker": per_worker}
    name = f"TorchRL AsyncBatchedCollector, env_exchange shm, 2 workers of {per_worker} envs"
    return Run(name, "async_batched", options)


def slots(envs: int) -> Run:
    options = {"envs": envs, "batch": 1024, "slots": True, "chunk": 64}
    name = f"TorchRL AsyncBatchedCollector, process slots, {envs} envs, chunks of 64"
    return Run(name, "async_batched", options)


def vectorized(count: int) -> list[Run]:
    flags = ("--at_once", str(count))
    options = {"workers": 2, "batch": 4096}
    return [
        Run(f"sf_torchrl, {count} at once", "ours", options | {"envs": 2 * count}, flags),
        Run(
            f"TorchRL MultiAsyncCollector, {count} at once",
            "multi",
            options | {"envs": 1, "sync": False},
            flags,
        ),
    ]


SINGLE = Run("TorchRL Collector, 32 envs", "single", {"envs": 32, "batch": 4096})
PEERS = [multi(8), multi(32), multi(64), multi(32, sync=True), SINGLE]
TABLES = {
    "raw": (
        "CartPole-v1: gymnasium env here, GymEnv there (raw path)",
        [ours(256), ours(64), *PEERS, grouped(8), grouped(32), slots(8)],
    ),
    "counted": (
        "GymEnv with InitTracker, StepCounter, RewardSum (counted by the workers: raw path)",
        [ours(256), multi(32), multi(64)],
    ),
    "transformed": (
        "GymEnv with ObservationNorm, RewardScaling, StepCounter(max_steps) (generic path)",
        [ours(64), ours(128), *PEERS, grouped(8)],
    ),
    "vectorized": (
        "SyncVectorEnv here, GymWrapper around it there (vectorized path)",
        [run for count in (8, 32, 128) for run in vectorized(count)],
    ),
}


def table(runs: list[Run], rates: dict[str, list[float]]) -> str:
    """Markdown: medians, spreads, and the first system's advantage over each."""
    lines = [
        "| collector | env steps/s (median) | spread | first beside it |",
        "|---|---|---|---|",
    ]
    best = statistics.median(rates[runs[0].name])
    for run in runs:
        found = rates[run.name]
        median = statistics.median(found)
        lines.append(
            f"| {run.name} | {median:,.0f} | {min(found):,.0f} to {max(found):,.0f} "
            f"| {best / median:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=TABLES, action="append")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = [
        f"# Sampling beside TorchRL's collectors: {time.strftime('%Y-%m-%d')}",
        f"{machine.describe()}; load before: {machine.load():.1f}\n\nsf_torchrl: commit "
        f"{machine.commit()}, {machine.versions()}",
        "The policy is the same everywhere: TorchRL's ProbabilisticActor on two layers of 64 tanh "
        f"units. Medians of {arguments.repeat} rounds of {arguments.seconds:.0f} s taken turn by "
        "turn. Frames equal steps (no frame skip). No learner.",
    ]
    chosen = [(env, *TABLES[env]) for env in arguments.only or TABLES]
    rates: dict[str, dict[str, list[float]]] = {env: {} for env, _, _ in chosen}
    for number in range(arguments.repeat):
        for env, _, runs in chosen:
            for run in runs:
                rate = run.measure(env, arguments.seconds)
                rates[env].setdefault(run.name, []).append(rate)
                print(f"{number + 1}/{arguments.repeat} {env}, {run.name}: {rate:,.0f}", flush=True)
    for env, title, runs in chosen:
        text.append(f"## {title}\n\n{table(runs, rates[env])}")
    result = "\n\n".join(text) + "\n"
    print(result)
    if arguments.output is not None:
        arguments.output.write_text(result)


if __name__ == "__main__":
    main()
