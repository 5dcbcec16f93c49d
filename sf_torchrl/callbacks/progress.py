"""The progress bar: env steps of the target, and what limits the run."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar

from sf_torchrl.callbacks.meter import RunMeter, target_env_steps
from sf_torchrl.module import APPOModule

_WIDTH = 20


class EnvStepsProgressBar(ProgressBar):
    """Three lines, rewritten in place on a terminal and repeated every few seconds elsewhere.

    Args:
        every_s: seconds between refreshes on a terminal.
        every_s_in_files: seconds between lines where the output is no terminal.
    """

    def __init__(self, every_s: float = 0.5, every_s_in_files: float = 10.0) -> None:
        super().__init__()
        self.every_s = every_s
        self.every_s_in_files = every_s_in_files
        self._enabled = True
        self._meter = RunMeter()
        self._next_s = 0.0
        self._began_s = 0.0
        self._began_steps = 0
        self._lines_shown = 0
        self._text = ""

    def disable(self) -> None:
        """Show nothing; Lightning does this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show it again."""
        self._enabled = True

    @property
    def _terminal(self) -> bool:
        return sys.stderr.isatty()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin measuring."""
        assert isinstance(pl_module, APPOModule)
        self._meter.start(trainer, pl_module)
        self._began_s, self._began_steps = time.monotonic(), pl_module.env_steps
        self._next_s = self._began_s + 1.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Refresh if it is time."""
        now = time.monotonic()
        if self._enabled and now >= self._next_s:
            self._next_s = now + (self.every_s if self._terminal else self.every_s_in_files)
            self._show(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show the end."""
        if self._enabled:
            self._show(trainer, pl_module)
            self._lines_shown = 0

    def on_exception(self, *_: Any) -> None:
        """Leave the last lines standing above the error."""
        self._lines_shown = 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar."""
        self._erase()
        print(*args, **kwargs)
        if self._text:
            self._draw(self._text)

    def _show(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, APPOModule)
        self._erase()
        self._draw(self._describe(trainer, module))

    def _erase(self) -> None:
        if self._terminal and self._lines_shown:
            sys.stderr.write(f"\x1b[{self._lines_shown}F\x1b[J")
        self._lines_shown = 0

    def _draw(self, text: str) -> None:
        self._text = text
        if self._terminal:  # a wrapped line could not be erased
            width = shutil.get_terminal_size().columns - 1
            text = "\n".join(line[:width] for line in text.split("\n"))
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        self._lines_shown = text.count("\n") + 1

    def _describe(self, trainer: pl.Trainer, module: APPOModule) -> str:
        metrics = self._meter.measure(trainer, module)
        speed = (
            f"{metrics.get('throughput/env_steps_per_s', 0):,.0f} env steps/s  "
            f"{metrics.get('throughput/env_frames_per_s', 0):,.0f} env frames/s"
        )
        if "collect/mean_return" in metrics:
            episodes = (
                f"return {metrics['collect/mean_return']:.2f}  "
                f"length {metrics['collect/mean_length']:.1f}"
            )
        else:
            episodes = "no episode finished yet"
        parts = []
        if "lag/mean" in metrics:
            parts.append(f"lag {metrics['lag/mean']:.1f} max {metrics['lag/max']:.0f}")
        shares = [
            f"{label} {metrics[key]:.0%}"
            for label, key in (
                ("env workers", "busy/env_workers"),
                ("inference", "busy/inference_worker"),
                ("learner", "busy/learner"),
            )
            if key in metrics
        ]
        parts.append("busy: " + ", ".join(shares))
        # Three lines, each short enough for a terminal of 80 columns.
        return "\n  ".join(
            [self._progress(trainer, module), f"{speed}  |  {episodes}", "  |  ".join(parts)]
        )

    def _progress(self, trainer: pl.Trainer, module: APPOModule) -> str:
        target, done = target_env_steps(trainer), module.env_steps
        seconds = time.monotonic() - self._began_s
        if target is None:
            return f"{done:,} env steps  {_clock(seconds)}"
        share = min(done / target, 1.0)
        filled = int(share * _WIDTH)
        left = "?"
        if done > self._began_steps:
            rate = (done - self._began_steps) / seconds
            left = _clock(max(target - done, 0) / rate)
        bar = "█" * filled + "░" * (_WIDTH - filled)
        return f"{share:4.0%} {bar} {done:,}/{target:,} env steps  {_clock(seconds)}<{left}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
