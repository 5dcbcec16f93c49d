"""Checkpoints by time and by mean return."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sf_torchrl.callbacks.meter import collector_stats
from sf_torchrl.collector import RETURN_WINDOW
from sf_torchrl.module import APPOModule

LAST, BEST = "last.ckpt", "best.ckpt"
_MIN_IMPROVEMENT = 1e-3  # Sample Factory's


class EnvStepCheckpoint(ModelCheckpoint):
    """``last.ckpt``, ``best.ckpt`` by mean return, and the newest few by env steps.

    Each is written to a temporary file beside it and renamed, so that whoever reads one finds it
    whole. They hold tensors and plain values only.

    Args:
        dirpath: where; None is ``checkpoints`` in the Trainer's ``default_root_dir``.
        save_every_s: seconds between checkpoints. Sample Factory's save_every_sec.
        save_best_every_s: seconds between looks for a better mean return.
        save_best_after: env steps before which no checkpoint is called the best.
        keep_checkpoints: newest periodic checkpoints that are kept.
    """

    def __init__(
        self,
        dirpath: str | None = None,
        save_every_s: float = 120.0,
        save_best_every_s: float = 5.0,
        save_best_after: int = 0,
        keep_checkpoints: int = 2,
    ) -> None:
        if save_every_s <= 0 or save_best_every_s <= 0:
            raise ValueError(
                f"save_every_s={save_every_s} and save_best_every_s={save_best_every_s} "
                "must be positive"
            )
        if keep_checkpoints < 0 or save_best_after < 0:
            raise ValueError(
                f"keep_checkpoints={keep_checkpoints} and save_best_after={save_best_after} "
                "must not be negative"
            )
        super().__init__(dirpath=dirpath, save_top_k=0)
        self.save_every_s = save_every_s
        self.save_best_every_s = save_best_every_s
        self.save_best_after = save_best_after
        self.keep_checkpoints = keep_checkpoints
        self.best_mean_return = float("-inf")
        self._began_with: int | None = None  # policy_version
        self._is_ours = False  # what lies in the directory is of this run
        self._next_s = self._next_best_s = 0.0

    def directory(self, trainer: pl.Trainer) -> Path:
        """Where this run's checkpoints are."""
        if self.dirpath is not None:
            return Path(self.dirpath)
        return Path(trainer.default_root_dir) / "checkpoints"

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """What ``ckpt_path="last"`` means."""
        path = self.directory(trainer) / LAST
        return {str(path)} if path.exists() else set()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Make the directory."""
        if stage == "fit" and trainer.is_global_zero:
            self.directory(trainer).mkdir(parents=True, exist_ok=True)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clocks."""
        assert isinstance(pl_module, APPOModule)
        self._began_with = pl_module.policy_version
        self._is_ours = self._began_with > 0  # a run that goes on, goes on in its directory
        now = time.monotonic()
        self._next_s, self._next_best_s = now + self.save_every_s, now + self.save_best_every_s

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Save what is due."""
        if trainer.fast_dev_run:
            return
        now = time.monotonic()
        if now >= self._next_best_s:
            self._next_best_s = now + self.save_best_every_s
            self._save_if_best(trainer, pl_module)
        if now >= self._next_s:
            self._next_s = now + self.save_every_s
            self._save_periodic(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: epochs mean nothing here."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing: the mean return of training decides."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the end."""
        if trainer.fast_dev_run:
            return
        self._save_if_best(trainer, pl_module)
        self._save_periodic(trainer, pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Save what was reached before a crash or Ctrl-C, if this run reached anything.

        A resume that fails must not overwrite the checkpoint it failed to load. Nothing is raised
        from here: the collector is shut down by a hook that comes later.
        """
        if self._began_with is None or trainer.fast_dev_run:
            return
        assert isinstance(pl_module, APPOModule)
        if pl_module.policy_version > self._began_with:
            try:
                path = self._save(trainer, LAST)
            except OSError as error:
                print(f"could not save {LAST}: {error}", file=sys.stderr)
                return
            if trainer.is_global_zero:
                signals = (KeyboardInterrupt, SIGTERMException)
                what = "interrupted" if isinstance(exception, signals) else "failed"
                print(f"{what}: saved {path}; go on with --ckpt_path last", file=sys.stderr)

    def _put_earlier_run_aside(self, trainer: pl.Trainer) -> None:
        """A run that is not continued keeps its checkpoints, under another name."""
        directory = self.directory(trainer)
        if not (directory / LAST).exists():
            return
        names = (f"{directory.name}-{number}" for number in itertools.count(1))
        aside = next(p for p in map(directory.with_name, names) if not p.exists())
        directory.rename(aside)
        directory.mkdir()
        print(f"the checkpoints of an earlier run are now in {aside}", file=sys.stderr)

    def _save_if_best(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, APPOModule)
        stats = collector_stats(trainer)
        mean_return = stats.get("mean_return")
        if (
            mean_return is None
            or stats.get("recent_episodes", 0) < RETURN_WINDOW
            or module.env_steps < self.save_best_after
            or mean_return < self.best_mean_return + _MIN_IMPROVEMENT
        ):
            return
        self.best_mean_return = float(mean_return)
        self._save(trainer, BEST)

    def _save_periodic(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        assert isinstance(module, APPOModule)
        saved = self._save(trainer, LAST)
        if self.keep_checkpoints == 0 or not trainer.is_global_zero:
            return
        name = f"env_steps-{module.env_steps:012d}.ckpt"
        temporary = saved.with_name(f".{name}.tmp")
        shutil.copyfile(saved, temporary)
        os.replace(temporary, saved.with_name(name))
        found = sorted(saved.parent.glob("env_steps-*.ckpt"), key=os.path.getmtime)
        for old in found[: -self.keep_checkpoints]:  # oldest first, whatever run wrote them
            old.unlink(missing_ok=True)

    def _save(self, trainer: pl.Trainer, name: str) -> Path:
        if not self._is_ours and trainer.is_global_zero:
            self._put_earlier_run_aside(trainer)
        self._is_ours = True
        path = self.directory(trainer) / name
        temporary = path.with_name(f".{name}.tmp")
        trainer.save_checkpoint(temporary)
        if trainer.is_global_zero:
            os.replace(temporary, path)
        if name == BEST:
            self.best_model_path = str(path)
        else:
            self.last_model_path = str(path)
        return path

    def state_dict(self) -> dict[str, Any]:
        """The best mean return, so that a resumed run does not overwrite a better one."""
        return {
            "best_mean_return": self.best_mean_return,
            "best_model_path": self.best_model_path,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.best_mean_return = float(state_dict["best_mean_return"])
        self.best_model_path = str(state_dict["best_model_path"])
