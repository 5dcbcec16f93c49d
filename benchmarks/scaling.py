"""How throughput grows with the number of envs and with the size of the observation; a plot.

    python -m benchmarks.scaling --seconds 5 --output benchmarks/results/scaling_NAME

Writes NAME.md and NAME.png: training, env steps/s, of the env without a cost of its own. What the
networks alone take of the two cores is measured beside it (see ``network_us``).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.workloads import WORKLOADS

ENVS = (8, 16, 32, 64, 128, 256, 512)
SIZES = (42, 64, 84, 128, 168)
NUM_WORKERS = 2


def measure(num_envs: int, size: int, seconds: float) -> dict[str, float]:
    """One training run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.run_once", "--workload", "synth"]
    command += ["--mode", "train", "--seconds", str(seconds)]
    command += ["--env_kwargs", json.dumps({"size": size})]
    frames_per_batch = max(1024, num_envs * 8)
    collector = {
        "num_workers": NUM_WORKERS,
        "num_envs_per_worker": num_envs // NUM_WORKERS,
        "rollout_length": 32 if num_envs <= 256 else 16,
        "frames_per_batch": frames_per_batch,
    }
    command += ["--collector", json.dumps(collector)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def network_us(size: int, rows: int, repeat: int = 7) -> tuple[float, float]:
    """Microseconds of one thread for a picture: acting on ``rows`` at once; training on 1024.

    The network alone, as learner and inference worker run it: forward; forward, backward and
    optimizer. No loss, no targets, no copies.
    """
    from sf_torchrl import ActorCritic

    workload = WORKLOADS["synth"]
    torch.set_num_threads(1)
    env = type(workload)(**{**vars(workload), "env_kwargs": {"size": size}}).env_fn
    policy = ActorCritic.for_env(env, **workload.network)
    optimizer = torch.optim.Adam(policy.parameters(), fused=True)
    seen = torch.randint(0, 256, (1024, 4, size, size), dtype=torch.uint8)

    def act() -> None:
        with torch.no_grad():
            policy.network.act([seen[:rows]], sample=True)

    def train() -> None:
        params, value = policy.evaluate([seen])
        optimizer.zero_grad()
        (params.square().mean() + value.square().mean()).backward()
        optimizer.step()

    torch.autocast_increment_nesting()  # as in the inference worker: weights stay converted
    act_us = _median_us(act, repeat) / rows
    torch.autocast_decrement_nesting()
    return act_us, _median_us(train, repeat) / 1024


def _median_us(function, repeat: int) -> float:
    function()
    taken = []
    for _ in range(repeat):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken) * 1e6


def plot(by_envs: dict[int, float], by_size: dict[int, float], file: Path) -> None:
    """Two panels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, found, label in (
        (left, by_envs, "envs in two workers"),
        (right, by_size, "height and width of four grey pictures"),
    ):
        axes.plot(list(found), list(found.values()), marker="o", markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(found), [str(value) for value in found])
        axes.minorticks_off()
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("env steps/s, training")
    left.set_title("84x84")
    right.set_title("32 envs")
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path, help="path without ending")
    arguments = parser.parse_args()
    load = machine.load()
    by_envs = {n: measure(n, 84, arguments.seconds)["env_steps_per_s"] for n in ENVS}
    by_size = {s: measure(32, s, arguments.seconds)["env_steps_per_s"] for s in SIZES}
    act_us, train_us = network_us(84, rows=32)
    share = by_envs[32] * (act_us + train_us) / 2e6
    text = (
        f"# How training grows, no-op env, Nature CNN + 512: {time.strftime('%Y-%m-%d')}\n\n"
        f"{machine.describe()}; load before: {load:.1f}\n\nCommit {machine.commit()}, "
        f"{machine.versions()}\n\n| envs (84x84x4) | env steps/s |\n|---|---|\n"
        + "".join(f"| {n} | {rate:,.0f} |\n" for n, rate in by_envs.items())
        + "\n| size (32 envs) | env steps/s |\n|---|---|\n"
        + "".join(f"| {size}x{size}x4 | {rate:,.0f} |\n" for size, rate in by_size.items())
        + f"\nThe networks alone, one thread: {act_us:.0f} us a picture to act on 32 at once, "
        f"{train_us:.0f} us to train on 1024. At {by_envs[32]:,.0f} env steps/s of 32 envs that "
        f"is {share:.0%} of two cores; {1 - share:.0%} is everything else, idling included.\n"
    )
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".md").write_text(text)
        plot(by_envs, by_size, arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
