"""Time to a mean return, seed by seed, through the real command line; a table and a plot.

    python -m benchmarks.learning --config configs/cartpole.yaml --target 475 --seeds 0 1 2 3 4 \
        --output benchmarks/results/cartpole_learning_NAME
    python -m benchmarks.learning --config configs/atari_pong.yaml --target 18 \
        --finished runs/atari_pong --output benchmarks/results/pong_learning_NAME

Writes NAME.md and NAME.png. Seconds count from the start of the process, imports included. With
--finished nothing is trained: the folders are runs of the config that were left by ``fit``.
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

import yaml

from benchmarks import machine

COMMAND = [sys.executable, "-m", "sf_torchrl"]


@dataclass(frozen=True)
class Run:
    """One seed."""

    seed: int
    seconds: list[float]
    env_steps: list[int]
    mean_return: list[float]
    frames_a_step: int
    deterministic: dict[str, float]
    sampled: dict[str, float]

    def reached(self, target: float) -> tuple[float, int] | None:
        """Seconds and env steps at which the training mean first reached the target."""
        for second, steps, value in zip(
            self.seconds, self.env_steps, self.mean_return, strict=True
        ):
            if value >= target:
                return second, steps
        return None


def train(config: Path, seed: int, directory: str, extra: list[str]) -> None:
    """Train one seed."""
    subprocess.run(
        [
            *COMMAND,
            "fit",
            f"--config={config}",
            f"--seed_everything={seed}",
            f"--trainer.default_root_dir={directory}",
            "--reports.every_s=0.5",
            *extra,
        ],
        check=True,
        stderr=subprocess.DEVNULL,
    )


def evaluate(directory: Path, episodes: int, deterministic: bool) -> dict[str, float]:
    """What 100 episodes of the last checkpoint come to."""
    done = subprocess.run(
        [
            *COMMAND,
            "evaluate",
            f"--checkpoint={directory}/checkpoints/last.ckpt",
            f"--episodes={episodes}",
            f"--deterministic={str(deterministic).lower()}",
            "--json",
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def read(directory: Path, episodes: int) -> Run:
    """A finished run: its curve, and evaluations."""
    (file,) = directory.glob("csv/*/metrics.csv")
    rows = [row for row in csv.DictReader(file.open()) if row["collect/mean_return"]]
    frames, steps = (
        max(float(row[f"throughput/env_{unit}_per_s"]) for row in rows)
        for unit in ("frames", "steps")
    )
    return Run(
        seed=yaml.safe_load((directory / "config.yaml").read_text())["seed_everything"],
        seconds=[float(row["time/since_process_start_s"]) for row in rows],
        env_steps=[int(row["step"]) for row in rows],
        mean_return=[float(row["collect/mean_return"]) for row in rows],
        frames_a_step=round(frames / steps),
        deterministic=evaluate(directory, episodes, True),
        sampled=evaluate(directory, episodes, False),
    )


def table(runs: list[Run], target: float) -> str:
    """Markdown."""
    lines = [
        f"| seed | seconds to a training mean of {target:g} | env steps (frames) to it "
        "| seconds, env steps (frames) in all | deterministic: mean return (std, min) "
        "| sampled: mean return (std, min) |",
        "|---|---|---|---|---|---|",
    ]
    for entry in runs:
        reached, skip = entry.reached(target), entry.frames_a_step
        when = "never | never"
        if reached is not None:
            when = f"{reached[0]:.1f} | {reached[1]:,} ({skip * reached[1]:,})"
        steps = entry.env_steps[-1]
        lines.append(
            f"| {entry.seed} | {when} | {entry.seconds[-1]:.0f}, {steps:,} ({skip * steps:,}) "
            f"| {_told(entry.deterministic)} | {_told(entry.sampled)} |"
        )
    times = [r[0] if (r := entry.reached(target)) else float("inf") for entry in runs]
    lines.append(f"| median | {statistics.median(times):.1f} | | | | |")
    return "\n".join(lines)


def _told(found: dict[str, float]) -> str:
    return f"{found['mean_return']:.2f} ({found['std_return']:.2f}, {found['min_return']:g})"


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
    parser.add_argument("--finished", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--target", type=float, default=475.0)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--title", default="CartPole-v1, 2 cores")
    parser.add_argument("--note", default="", help="a sentence for the result file")
    parser.add_argument("--output", type=Path, help="path without ending")
    arguments, extra = parser.parse_known_args()
    load = machine.load()
    runs = [read(directory, arguments.episodes) for directory in arguments.finished or ()]
    for seed in [] if arguments.finished else arguments.seeds:
        with tempfile.TemporaryDirectory() as directory:
            train(arguments.config, seed, directory, extra)
            runs.append(read(Path(directory), arguments.episodes))
        print(seed, runs[-1].reached(arguments.target), runs[-1].deterministic, flush=True)
    options = "".join(f" {option}" for option in extra)
    text = (
        f"# {arguments.title}: {time.strftime('%Y-%m-%d')}\n\n{machine.describe()}; load before: "
        f"{load:.1f}\n\nCommit {machine.commit()}, {machine.versions()}\n\n"
        f"`sf-torchrl fit --config {arguments.config}{options}`, then {arguments.episodes} "
        f"episodes of `last.ckpt`.{' ' + arguments.note if arguments.note else ''}\n\n"
        f"{table(runs, arguments.target)}\n"
    )
    print(text)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.with_suffix(".md").write_text(text)
        plot(runs, arguments.target, arguments.output.with_suffix(".png"), arguments.title)


if __name__ == "__main__":
    main()
