"""A workload beside its peers, taken turn by turn in one run, so that a slow minute hits everyone.

    python -m benchmarks.beside_peers --workload doom --scripts DIR --repeat 3 --output NAME.md

DIR holds the peers' scripts (bench_sf.py, bench_torchrl.py, bench_sync_loop.py, bench_puffer.py,
bench_sb3.py), each printing or logging one JSON line; BENCH_SF_PY, BENCH_PEERS_PY and
BENCH_PUFFER_PY name the interpreters that have the peers, PUFFERLIB_SOURCE its built source. All
get the same env (of DIR's common.py, but for CartPole), layers, batch and one epoch. Peers whose
interpreter is not named are left out.
"""

import argparse
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.systems import Ours, System, table, take

SERIAL = {"num_workers": 0, "num_envs_per_worker": 64, "num_splits": 1}
CARTPOLE_TRAIN = [
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
CARTPOLE_SAMPLE = [
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

FP32 = {"precision": "float32"}
FP32_ENVS = {"num_envs_per_worker": 24}
SAMPLE_ENVS = {"num_envs_per_worker": 16}
GRU = {"core": "gru"}


def _pixels(sf: str, loop: str, torchrl: str) -> list:
    """Training systems of a pixel workload; the flags are those that suit each peer best."""
    return [
        Ours("sf_torchrl, bfloat16", "train", {}),
        Ours("sf_torchrl, float32", "train", FP32_ENVS, FP32),
        System("Sample Factory 2.1.1", "train", "BENCH_SF_PY", "bench_sf.py", f"{sf} --warmup 3"),
        System(
            "synchronous loop",
            "train",
            "BENCH_PEERS_PY",
            "bench_sync_loop.py",
            f"{loop} --threads 2 --warmup 3",
            threads=2,
        ),
        System(
            "TorchRL MultiAsyncCollector",
            "train",
            "BENCH_PEERS_PY",
            "bench_torchrl.py",
            f"--collector multi_async --workers 1 {torchrl} --threads 2 --warmup 3",
            threads=2,
        ),
    ]


DOOM_SF = "--workers 2 --envs 8 --splits 2"
DOOM_GRU = [
    Ours("sf_torchrl, GRU 512, bfloat16", "train", {}, GRU),
    Ours("sf_torchrl, GRU 512, float32", "train", FP32_ENVS, GRU | FP32),
    System(
        "Sample Factory 2.1.1, GRU 512",
        "train",
        "BENCH_SF_PY",
        "bench_sf.py",
        f"{DOOM_SF} --rnn 1 --warmup 3",
    ),
]
DOOM_SAMPLE = [
    Ours("sf_torchrl, bfloat16", "sample", SAMPLE_ENVS),
    Ours("sf_torchrl, float32", "sample", SAMPLE_ENVS, FP32),
    System(
        "Sample Factory 2.1.1",
        "sample",
        "BENCH_SF_PY",
        "bench_sf.py",
        f"--mode sample {DOOM_SF} --warmup 2",
        renamed=("sampling.sync_sampling_api", "sampling.simplified_sampling_api"),
    ),
    System(
        "TorchRL MultiAsyncCollector",
        "sample",
        "BENCH_PEERS_PY",
        "bench_torchrl.py",
        "--mode sample --collector multi_async --workers 2 --envs 8 --warmup 2",
    ),
]
TABLES = {
    "cartpole": (
        "CartPole-v1, MLP 2x64, batch 2048, rollout 32, one epoch",
        {"Full training": CARTPOLE_TRAIN, "Sampling only": CARTPOLE_SAMPLE},
    ),
    "doom": (
        "VizDoom basic, 3x72x128, frame skip 4, convnet_simple + 512, batch 1024, one epoch",
        {
            "Full training": _pixels(DOOM_SF, "--vec async --envs 8 --rollout 128", "--envs 8"),
            "Full training with a GRU": DOOM_GRU,
            "Sampling only": DOOM_SAMPLE,
        },
    ),
    "atari": (
        "Atari Breakout, 4x84x84, frame skip 4, Nature CNN + 512, batch 1024, one epoch",
        {
            "Full training": _pixels(
                "--workers 2 --envs 20 --splits 2",
                "--vec async --envs 16 --rollout 64",
                "--envs 16",
            )
        },
    ),
    "synth": (
        "No-op env, 4x84x84, Nature CNN + 512, batch 1024, one epoch",
        {
            "Full training": _pixels(
                "--workers 2 --envs 20 --splits 2",
                "--vec sync --envs 32 --rollout 32",
                "--envs 32",
            )
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=TABLES, default="cartpole")
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", help="one of the workload's tables: 'Full training' and so on")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    title, tables = TABLES[arguments.workload]
    text = [
        f"# {title}: {time.strftime('%Y-%m-%d')}",
        f"{machine.describe()}; load before: {machine.load():.1f}\n\nsf_torchrl: commit "
        f"{machine.commit()}, {machine.versions()}",
        f"Medians of {arguments.repeat} rounds of {arguments.seconds:.0f} s taken turn by turn. "
        "Env steps, not frames: multiply by the frame skip where there is one.",
    ]
    if arguments.only:
        if arguments.only not in tables:
            parser.error(f"--only {arguments.only!r} must be one of {', '.join(tables)}")
        tables = {arguments.only: tables[arguments.only]}
    for name, systems in tables.items():
        present = [system for system in systems if system.available()]
        runs = take(
            present, arguments.workload, arguments.scripts, arguments.seconds, arguments.repeat
        )
        text.append(f"## {name}\n\n{table(present, runs)}")
    result = "\n\n".join(text) + "\n"
    print(result)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(result)


if __name__ == "__main__":
    main()
