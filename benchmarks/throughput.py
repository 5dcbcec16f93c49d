"""Throughput, memory and start of one workload: the median of several fresh processes.

    python -m benchmarks.throughput --workload cartpole --mode train --seconds 10 [--json]

Prints a Markdown row, and appends it to a file with --output. With --json the last line is one
JSON object.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import machine
from benchmarks.workloads import WORKLOADS

HEADER = (
    "| date | commit | workload | mode | config | env steps/s (median, spread) | env frames/s "
    "| MB (proportional) | first batch s | load before |\n" + "|---" * 10 + "|"
)


def measure(workload: str, mode: str, seconds: float, collector: dict) -> dict[str, float]:
    """One run in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.run_once", "--workload", workload]
    command += ["--mode", mode, "--seconds", str(seconds), "--collector", json.dumps(collector)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def summarize(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians, and the spread of env steps/s."""
    keys = [key for key in runs[0] if key in runs[-1]]
    found = {key: statistics.median(run[key] for run in runs) for key in keys}
    rates = [run["env_steps_per_s"] for run in runs]
    return found | {"min_env_steps_per_s": min(rates), "max_env_steps_per_s": max(rates)}


def row(workload: str, mode: str, config: dict, found: dict[str, float], load: float) -> str:
    """The Markdown row."""
    text = ", ".join(f"{key}={value}" for key, value in config.items())
    memory = f"{found['pss_mb']:.0f}" if "pss_mb" in found else "-"
    first = f"{found['first_batch_s']:.1f}" if "first_batch_s" in found else "-"
    spread = f"{found['min_env_steps_per_s']:,.0f} to {found['max_env_steps_per_s']:,.0f}"
    return (
        f"| {time.strftime('%Y-%m-%d')} | {machine.commit()} | {workload} | {mode} | {text} "
        f"| {found['env_steps_per_s']:,.0f} ({spread}) | {found['env_frames_per_s']:,.0f} "
        f"| {memory} | {first} | {load:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="cartpole")
    parser.add_argument("--mode", choices=("sim", "sample", "train"), default="train")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured, after the warm-up")
    parser.add_argument("--repeat", type=int, default=3, help="runs; the median is reported")
    parser.add_argument("--collector", type=json.loads, default={}, help="JSON, over the workload")
    parser.add_argument("--output", type=Path, help="Markdown file to append the row to")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    arguments = parser.parse_args()
    load = machine.load()
    runs = [
        measure(arguments.workload, arguments.mode, arguments.seconds, arguments.collector)
        for _ in range(arguments.repeat)
    ]
    found = summarize(runs)
    config = WORKLOADS[arguments.workload].collector | arguments.collector
    line = row(arguments.workload, arguments.mode, config, found, load)
    print(f"{machine.describe()}\n{machine.versions()}\n\n{HEADER}\n{line}")
    if arguments.output is not None:
        new = not arguments.output.exists()
        with arguments.output.open("a") as file:
            if new:
                file.write(f"{machine.describe()}\n\n{machine.versions()}\n\n{HEADER}\n")
            file.write(line + "\n")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
