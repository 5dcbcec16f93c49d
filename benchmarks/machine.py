"""What a figure was measured on: machine, versions, commit, load; and the memory of a run."""

import os
import platform
import subprocess
import threading
import time
from importlib.metadata import version
from pathlib import Path

import psutil


def describe() -> str:
    """One line: processor, cores, memory."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}"


def versions() -> str:
    """Python and the packages that matter."""
    names = ("torch", "torchrl", "tensordict", "lightning", "gymnasium", "numpy")
    found = ", ".join(f"{name} {version(name)}" for name in names)
    return f"Python {platform.python_version()}, {found}"


def commit() -> str:
    """Short hash, with a plus sign where files differ from it."""
    try:
        run = ["git", "describe", "--always", "--dirty=+"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def load() -> float:
    """Processes that wanted to run over the last minute."""
    return os.getloadavg()[0]


class MemoryMeter:
    """Peak proportional memory of this process and its children, sampled in a thread."""

    def __init__(self, every_s: float = 1.0) -> None:
        self.peak_pss = 0
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()

    def sample(self) -> None:
        """Look once."""
        this = psutil.Process()
        total = 0
        for process in [this, *this.children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        self.peak_pss = max(self.peak_pss, total)

    def stop(self) -> float:
        """Megabytes at the peak."""
        self._stop.set()
        self._thread.join()
        return self.peak_pss / 2**20


def seconds_since_process_start() -> float:
    """Wall-clock age of this process, interpreter start included."""
    return time.time() - psutil.Process().create_time()
