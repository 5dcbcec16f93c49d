"""Time to a mean return, seed by seed, through the real command line; a table and a plot.

    python -m benchmarks.learning --config configs/cartpole.yaml --target 475 --seeds 0 1 2 3 4 \
        --output benchmarks/results/cartpole_learning_NAME

Writes NAME.md and NAME.png. Seconds count from the start of the process, imports included.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine


@dataclass(frozen=True)
class Run:
    """One seed."""

    seed: int
    seconds: list[float]
    env_steps: list[int]
    mean_return: list[float]
    whole_s: float
    evaluation: dict[str, float]

    def reached(self, target: float) -> tuple[float, int] | None:
        """Seconds and env steps at which the training mean first reached the target."""
        for second, steps, value in zip(
            self.seconds, self.env_steps, self.mean_return, strict=True
        ):
            if value >= target:
                return second, steps
        return None


def run(config: Path, seed: int, episodes: int) -> Run:
    """Train and evaluate one seed."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "sf_torchrl"]
        began = time.time()
        subprocess.run(
            [
                *command,
                "fit",
                f"--config={config}",
                f"--seed_everything={seed}",
                f"--trainer.default_root_dir={directory}",
                "--reports.every_s=0.25",
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        whole_s = time.time() - began
        (file,) = Path(directory).glob("csv/*/metrics.csv")
        rows = [row for row in csv.DictReader(file.open()) if row["collect/mean_return"]]
        done = subprocess.run(
            [
                *command,
                "evaluate",
                f"--checkpoint={directory}/checkpoints/last.ckpt",
                f"--episodes={episodes}",
                "--json",
            ],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    return Run(
        seed=seed,
        seconds=[float(row["time/since_process_start_s"]) for row in rows],
        env_steps=[int(row["step"]) for row in rows],
        mean_return=[float(row["collect/mean_return"]) for row in rows],
        whole_s=whole_s,
        evaluation=json.loads(done.stdout.splitlines()[-1]),
    )


def table(runs: list[Run], target: float) -> str:
    """Markdown."""
    lines = [
        f"| seed | seconds to a training mean of {target:.0f} | env steps to it | seconds in all "
        "| mean return of evaluation (std, min) |",
        "|---|---|---|---|---|",
    ]
    for entry in runs:
        reached = entry.reached(target)
        when = "never | never" if reached is None else f"{reached[0]:.1f} | {reached[1]:,}"
        found = entry.evaluation
        lines.append(
            f"| {entry.seed} | {when} | {entry.whole_s:.1f} | {found['mean_return']:.1f} "
            f"({found['std_return']:.1f}, {found['min_return']:.0f}) |"
        )
    times = [r[0] if (r := entry.reached(target)) else float("inf") for entry in runs]
    lines.append(f"| median | {statistics.median(times):.1f} | | | |")
    return "\n".join(lines)


def plot(runs: list[Run], target: float, file: Path, title: str) -> None:
    """Mean return against seconds since process start."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for entry in runs:
        axes.plot(entry.seconds, entry.mean_return, label=f"seed {entry.seed}")
    axes.axhline(target, color="gray", linestyle=":", linewidth=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds since process start, imports included")
    axes.set_ylabel("mean return of the last 100 episodes")
    axes.set_title(title)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/cartpole.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--title", default="CartPole-v1, 2 cores")
    parser.add_argument("--output", type=Path, help="path without ending")
    arguments = parser.parse_args()
    load = machine.load()
    runs = []
    for seed in arguments.seeds:
        runs.append(run(arguments.config, seed, arguments.episodes))
        print(seed, runs[-1].reached(arguments.target), runs[-1].evaluation, flush=True)
    text = (
        f"# {arguments.title}: {time.strftime('%Y-%m-%d')}\n\n{machine.describe()}; load before: "
        f"{load:.1f}\n\nCommit {machine.commit()}, {machine.versions()}\n\n"
        f"`sf-torchrl fit --config {arguments.config}`, then {arguments.episodes} deterministic "
        f"episodes of `last.ckpt`.\n\n{table(runs, arguments.target)}\n"
    )
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".md").write_text(text)
        plot(runs, arguments.target, arguments.output.with_suffix(".png"), arguments.title)


if __name__ == "__main__":
    main()
