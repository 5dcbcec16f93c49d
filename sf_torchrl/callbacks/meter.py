"""What a run is doing right now: one place for the numbers that bar and loggers show."""

from __future__ import annotations

import time
from dataclasses import dataclass

import lightning.pytorch as pl

from sf_torchrl.module import APPOModule


@dataclass(frozen=True)
class _Reading:
    """Counters at one moment."""

    at_s: float
    env_steps: int
    learner_busy_s: float
    env_workers_waited_s: float
    inference_waited_s: float


class RunMeter:
    """Rates and shares since the last reading, and the state of the last episodes and batches."""

    def __init__(self) -> None:
        self._last: _Reading | None = None

    def start(self, trainer: pl.Trainer, module: APPOModule) -> None:
        """Take the first reading."""
        self._last = self._read(module, collector_stats(trainer))

    def measure(self, trainer: pl.Trainer, module: APPOModule) -> dict[str, float]:
        """Metrics by their names in the logs, over the time since the last call.

        ``throughput/env_steps_per_s`` and ``throughput/env_frames_per_s``; ``busy/env_workers``,
        ``busy/inference_worker`` and ``busy/learner``: share of the time in [0, 1] not spent
        waiting for another; ``collect/mean_return`` (the env's own rewards) and
        ``collect/mean_length`` (env steps) of the last 100 episodes, ``collect/episodes``;
        ``lag/mean``, ``lag/max`` and ``lag/dropped_fraction`` (of steps) of the last 100 batches,
        in policy versions.
        """
        stats = collector_stats(trainer)
        now, before = self._read(module, stats), self._last
        self._last = now
        found: dict[str, float] = {}
        if before is not None and now.at_s > before.at_s:
            seconds = now.at_s - before.at_s
            rate = (now.env_steps - before.env_steps) / seconds
            frame_skip = getattr(getattr(trainer, "datamodule", None), "frame_skip", 1)
            found["throughput/env_steps_per_s"] = rate
            found["throughput/env_frames_per_s"] = rate * frame_skip
            found["busy/learner"] = (now.learner_busy_s - before.learner_busy_s) / seconds
            if "env_workers_waited_s" in stats:
                waited = now.env_workers_waited_s - before.env_workers_waited_s
                found["busy/env_workers"] = _share(1.0 - waited / seconds)
                waited = now.inference_waited_s - before.inference_waited_s
                found["busy/inference_worker"] = _share(1.0 - waited / seconds)
        for name in ("mean_return", "mean_length", "episodes"):
            if name in stats:
                found[f"collect/{name}"] = float(stats[name])
        lag = module.recent_lag
        if lag:
            found["lag/mean"] = sum(entry.mean for entry in lag) / len(lag)
            found["lag/max"] = float(max(entry.max for entry in lag))
            found["lag/dropped_fraction"] = sum(entry.dropped_fraction for entry in lag) / len(lag)
        return found

    def _read(self, module: APPOModule, stats: dict[str, float]) -> _Reading:
        return _Reading(
            at_s=time.monotonic(),
            env_steps=module.env_steps,
            learner_busy_s=module.busy_s,
            env_workers_waited_s=stats.get("env_workers_waited_s", 0.0),
            inference_waited_s=stats.get("inference_waited_s", 0.0),
        )


def _share(value: float) -> float:
    """Within [0, 1]: a wait is only counted when it ends, so a short interval may overshoot."""
    return min(max(value, 0.0), 1.0)


def collector_stats(trainer: pl.Trainer) -> dict[str, float]:
    """``stats()`` of the collector behind the Trainer's data; empty where there is none."""
    collector = getattr(getattr(trainer, "datamodule", None), "collector", None)
    stats = getattr(collector, "stats", None)
    return stats() if stats is not None else {}


def target_env_steps(trainer: pl.Trainer) -> int | None:
    """Env steps at which the run ends; None where it has no end."""
    collector = getattr(getattr(trainer, "datamodule", None), "collector", None)
    total = getattr(collector, "total_frames", float("inf"))
    return int(total) if 0 < total < float("inf") else None
