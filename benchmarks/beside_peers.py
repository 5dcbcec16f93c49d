"""CartPole beside its peers, taken turn by turn in one run, so that a slow minute hits everyone.

    python -m benchmarks.beside_peers --scripts DIR --repeat 3 --output benchmarks/results/NAME.md

DIR holds the peers' scripts (bench_sf.py, bench_torchrl.py, bench_sync_loop.py, bench_puffer.py,
bench_sb3.py), each printing or logging one JSON line; BENCH_SF_PY, BENCH_PEERS_PY and
BENCH_PUFFER_PY name the interpreters that have the peers, PUFFERLIB_SOURCE its built source. All
get the same env, layers, batch of 2048 and one epoch. Peers whose interpreter is not named are
left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine

COMMON = ["--workload", "cartpole"]


@dataclass(frozen=True)
class System:
    """One system in one mode."""

    name: str
    mode: str
    interpreter: str
    script: str
    flags: str

    def available(self) -> bool:
        return self.interpreter in os.environ

    def measure(self, scripts: Path, seconds: float) -> dict[str, float]:
        """One run; its JSON line."""
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "log.jsonl"
            command = [os.environ[self.interpreter], str(scripts / self.script), *COMMON]
            command += [*self.flags.split(), "--seconds", str(seconds)]
            environment = os.environ | {
                "BENCH_LOG": str(log),
                "BENCH_TRAIN_DIR": directory,
                "OMP_NUM_THREADS": "1",
            }
            subprocess.run(
                command,
                cwd=directory,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=300,
                check=False,
            )
            found = json.loads(log.read_text().splitlines()[-1])
        return {
            "env_steps_per_s": found["sps"],
            "pss_mb": found.get("peak_pss_mb", float("nan")),
            "first_batch_s": found.get("startup_s", float("nan")),
        }


@dataclass(frozen=True)
class Ours:
    """This package, through the harness."""

    name: str
    mode: str
    collector: dict[str, int]

    def available(self) -> bool:
        return True

    def measure(self, scripts: Path, seconds: float) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.run_once", *COMMON, "--mode", self.mode]
        command += ["--seconds", str(seconds), "--collector", json.dumps(self.collector)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])


SERIAL = {"num_workers": 0, "num_envs_per_worker": 64, "num_splits": 1}
TRAIN = [
    Ours("sf_torchrl", "train", {}),
    Ours("sf_torchrl, 64 envs a split", "train", {"num_envs_per_worker": 128}),
    Ours("sf_torchrl, num_workers 0", "train", SERIAL),
    System(
        "Sample Factory 2.1.1",
        "train",
        "BENCH_SF_PY",
        "bench_sf.py",
        "--workers 1 --envs 64 --splits 2 --batch 2048 --warmup 2",
    ),
    System(
        "synchronous loop",
        "train",
        "BENCH_PEERS_PY",
        "bench_sync_loop.py",
        "--envs 64 --rollout 32 --threads 1 --batch 2048 --warmup 1",
    ),
    System(
        "TorchRL MultiAsyncCollector",
        "train",
        "BENCH_PEERS_PY",
        "bench_torchrl.py",
        "--collector multi_async --workers 2 --envs 32 --batch 2048 --warmup 1",
    ),
    System(
        "PufferLib 3.0.0, 1 worker",
        "train",
        "BENCH_PUFFER_PY",
        "bench_puffer.py",
        "--mode train --backend Multiprocessing --workers 1 --half 0 --envs 64 --rollout 32 "
        "--batch 2048 --threads 1 --warmup 1",
    ),
    System(
        "PufferLib 3.0.0, Serial",
        "train",
        "BENCH_PUFFER_PY",
        "bench_puffer.py",
        "--mode train --backend Serial --envs 64 --rollout 32 --batch 2048 --threads 1 --warmup 1",
    ),
    System(
        "Stable-Baselines3 2.9.2",
        "train",
        "BENCH_PEERS_PY",
        "bench_sb3.py",
        "--envs 64 --rollout 32 --batch 2048 --threads 1 --warmup 1",
    ),
]
SAMPLE = [
    Ours("sf_torchrl", "sample", {}),
    System(
        "synchronous loop",
        "sample",
        "BENCH_PEERS_PY",
        "bench_sync_loop.py",
        "--mode sample --envs 64 --rollout 32 --threads 1 --warmup 1",
    ),
    System(
        "TorchRL MultiAsyncCollector",
        "sample",
        "BENCH_PEERS_PY",
        "bench_torchrl.py",
        "--mode sample --collector multi_async --workers 2 --envs 32 --batch 2048 --warmup 1",
    ),
]


def table(systems: list, runs: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians, spreads, and how many times faster the first system is."""
    lines = [
        "| system | env steps/s (median) | spread | first system beside it | MB (proportional) "
        "| first batch s |",
        "|---|---|---|---|---|---|",
    ]
    best = statistics.median(run["env_steps_per_s"] for run in runs[systems[0].name])
    for system in systems:
        rates = [run["env_steps_per_s"] for run in runs[system.name]]
        memory = statistics.median(run.get("pss_mb", float("nan")) for run in runs[system.name])
        first = statistics.median(run.get("first_batch_s", 0.0) for run in runs[system.name])
        median = statistics.median(rates)
        lines.append(
            f"| {system.name} | {median:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {best / median:.2f} | {memory:.0f} | {first:.1f} |"
        )
    return "\n".join(lines)


def take(systems: list, scripts: Path, seconds: float, repeat: int) -> dict:
    """``repeat`` rounds, every system once a round."""
    runs: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    for number in range(repeat):
        for system in systems:
            found = system.measure(scripts, seconds)
            runs[system.name].append(found)
            print(f"{number + 1}/{repeat} {system.name}: {found}", flush=True)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = [
        f"# CartPole-v1, MLP 2x64, batch 2048, rollout 32, one epoch: {time.strftime('%Y-%m-%d')}",
        f"{machine.describe()}; load before: {machine.load():.1f}\n\nsf_torchrl: commit "
        f"{machine.commit()}, {machine.versions()}",
        f"Medians of {arguments.repeat} rounds of {arguments.seconds:.0f} s taken turn by turn. "
        "Frames equal steps (no frame skip).",
    ]
    for title, systems in (("Full training", TRAIN), ("Sampling only", SAMPLE)):
        present = [system for system in systems if system.available()]
        runs = take(present, arguments.scripts, arguments.seconds, arguments.repeat)
        text.append(f"## {title}\n\n{table(present, runs)}")
    result = "\n\n".join(text) + "\n"
    print(result)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(result)


if __name__ == "__main__":
    main()
