"""Systems to be measured: this package and its peers, each run in a fresh process."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class System:
    """One system in one mode."""

    name: str
    mode: str
    interpreter: str
    script: str
    flags: str
    threads: int = 1
    renamed: tuple[str, str] | None = None
    """A module that the script imports under another version's name: (its name there, here)."""

    def available(self) -> bool:
        return self.interpreter in os.environ

    def measure(self, workload: str, scripts: Path, seconds: float) -> dict[str, float]:
        """One run; its JSON line."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
            log = Path(directory) / "log.jsonl"
            command = [os.environ[self.interpreter], str(self._script(scripts, Path(directory)))]
            command += ["--workload", workload]
            command += [*self.flags.split(), "--seconds", str(seconds)]
            environment = os.environ | {
                "BENCH_LOG": str(log),
                "BENCH_TRAIN_DIR": directory,
                "OMP_NUM_THREADS": str(self.threads),
                "OMP_WAIT_POLICY": "passive",
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
            if not log.exists():
                raise RuntimeError(f"{self.name} failed; run {command} by hand to see why")
            found = json.loads(log.read_text().splitlines()[-1])
        return {
            "env_steps_per_s": found["sps"],
            "pss_mb": found.get("peak_pss_mb", float("nan")),
            "first_batch_s": found.get("startup_s", float("nan")),
        }

    def _script(self, scripts: Path, directory: Path) -> Path:
        if self.renamed is None:
            return scripts / self.script
        shutil.copy(scripts / "common.py", directory)
        adapted = directory / self.script
        adapted.write_text((scripts / self.script).read_text().replace(*self.renamed))
        return adapted


@dataclass(frozen=True)
class Ours:
    """This package, through the harness."""

    name: str
    mode: str
    collector: dict[str, int]
    network: dict[str, Any] = field(default_factory=dict)

    def available(self) -> bool:
        return True

    def measure(self, workload: str, scripts: Path, seconds: float) -> dict[str, float]:
        command = [sys.executable, "-m", "benchmarks.run_once", "--mode", self.mode]
        command += ["--workload", workload, "--seconds", str(seconds)]
        command += ["--collector", json.dumps(self.collector)]
        command += ["--network", json.dumps(self.network)]
        if workload != "cartpole":
            command += ["--env_from", str(scripts)]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])


def table(systems: list, runs: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: medians, spreads, and how many times faster the first system is."""
    lines = [
        "| system | env steps/s (median) | spread | first system beside it | MB (proportional) "
        "| first batch s |",
        "|---|---|---|---|---|---|",
    ]
    best = statistics.median(run["env_steps_per_s"] for run in runs[systems[0].name])
    for system in systems:
        if not runs[system.name]:
            lines.append(f"| {system.name} | did not run | | | | |")
            continue
        rates = [run["env_steps_per_s"] for run in runs[system.name]]
        memory = statistics.median(run.get("pss_mb", float("nan")) for run in runs[system.name])
        first = statistics.median(run.get("first_batch_s", 0.0) for run in runs[system.name])
        median = statistics.median(rates)
        lines.append(
            f"| {system.name} | {median:,.0f} | {min(rates):,.0f} to {max(rates):,.0f} "
            f"| {best / median:.2f} | {memory:.0f} | {first:.1f} |"
        )
    return "\n".join(lines)


def take(
    systems: list, workload: str, scripts: Path, seconds: float, repeat: int
) -> dict[str, list[dict[str, float]]]:
    """``repeat`` rounds, every system once a round."""
    runs: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    for number in range(repeat):
        for system in systems:
            try:
                found = system.measure(workload, scripts, seconds)
            except (RuntimeError, subprocess.TimeoutExpired) as error:  # a peer; ours is to raise
                print(f"{number + 1}/{repeat} {error}", flush=True)
                continue
            runs[system.name].append(found)
            print(f"{number + 1}/{repeat} {system.name}: {found}", flush=True)
    return runs
