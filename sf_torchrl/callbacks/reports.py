"""Reports to the loggers, on a timer."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl

from sf_torchrl.callbacks.meter import RunMeter
from sf_torchrl.module import APPOModule

_IMPORTED_S = time.time()
_FIRST_S = 0.5  # until the first report; intervals double from there


def _process_started_s() -> float:
    """Unix time at which this process started; where that cannot be known, this import."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rsplit(")", 1)[1].split()[19])
        with open("/proc/uptime") as file:
            uptime_s = float(file.read().split()[0])
    except OSError:
        return _IMPORTED_S
    return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))


class StatsReporter(pl.Callback):
    """Logs what the run is doing, and the newest losses, every few seconds and at the end.

    Past ``Trainer``'s own logging, which costs 0.2 ms a value; the x axis is env steps, exact
    beyond 2**24. Names: those of :class:`~sf_torchrl.callbacks.meter.RunMeter`, and ``train/...``
    with the newest minibatch's losses, gradient norm and diagnostics;
    ``time/since_process_start_s`` counts imports too.

    Args:
        every_s: seconds between reports, after shorter intervals at first. Sample
            Factory's experiment_summaries_interval is 10.
    """

    def __init__(self, every_s: float = 5.0) -> None:
        if every_s <= 0:
            raise ValueError(f"every_s={every_s} must be positive")
        self.every_s = every_s
        self._meter = RunMeter()
        self._interval_s = self._next_s = 0.0
        self._running = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin measuring."""
        assert isinstance(pl_module, APPOModule)
        self._meter.start(trainer, pl_module)
        self._interval_s = min(_FIRST_S, self.every_s)
        self._next_s = time.monotonic() + self._interval_s
        self._running = True

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Report if it is time."""
        if time.monotonic() >= self._next_s:
            self._report(trainer, pl_module)
            self._interval_s = min(2 * self._interval_s, self.every_s)
            self._next_s = time.monotonic() + self._interval_s

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report the end."""
        self._report(trainer, pl_module)
        self._running = False

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Report how far it came."""
        if self._running:
            self._report(trainer, pl_module)
            self._running = False

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, APPOModule)
        metrics = self._meter.measure(trainer, module)
        metrics |= {key: float(value) for key, value in module.last_metrics.items()}
        metrics |= {
            "train/policy_version": float(module.policy_version),
            "train/skipped_minibatches": float(module.skipped_minibatches),
            "time/since_process_start_s": time.time() - _process_started_s(),
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=module.env_steps)
            logger.save()  # CSVLogger would keep them to itself until the end
