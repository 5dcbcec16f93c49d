"""The command line: ``sf-torchrl fit`` through ``LightningCLI``, ``evaluate`` and ``play``."""

from __future__ import annotations

import difflib
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import (
    LightningArgumentParser,
    LightningCLI,
    SaveConfigCallback,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from sf_torchrl.callbacks.checkpoints import LAST, EnvStepCheckpoint
from sf_torchrl.callbacks.progress import EnvStepsProgressBar
from sf_torchrl.callbacks.reports import StatsReporter
from sf_torchrl.commands import CONFIG_FILE, UsageError, evaluate, play, read_checkpoint
from sf_torchrl.data import EnvDataModule
from sf_torchrl.envs.spaces import EnvError
from sf_torchrl.module import APPOModule
from sf_torchrl.workers.supervisor import WorkerError

FAILURE = 1
USAGE_ERROR = 2
WORKER_FAILURE = 3
TERMINATED = 143  # as a shell says of a process that SIGTERM ended


class _OneLineParser(LightningArgumentParser):
    """A parser whose errors are one line with the closest valid name, not a page of usage."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.allow_abbrev = False  # a typing error must not pass for another option

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UsageError(_one_line(message, self)) from ex


def _one_line(message: str, parser: jsonargparse.ArgumentParser) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = re.sub(r"^Parser key ", "", " ".join(lines)).replace("fit.", "")
    text = re.sub(r"<class '(\w+)'>", r"\1", text)
    unknown = re.search(r"(?:option|Key|key) '([\w.]+)'|arguments?: --([\w.]+)", message)
    if unknown:
        name = unknown.group(1) or unknown.group(2)
        known = _option_names(parser)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
        if close and close[0] != name:
            text += f"; did you mean '{close[0]}'?"
    return text


def _option_names(parser: jsonargparse.ArgumentParser) -> list[str]:
    names = []
    for action in parser._actions:
        names += [option.lstrip("-") for option in action.option_strings]
        for sub in (getattr(action, "_name_parser_map", None) or {}).values():
            names += _option_names(sub)
    return names


class _Began(pl.Callback):
    """Knows whether training has begun: errors before are the user's, after are failures."""

    training = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        _Began.training = True


class _SaveConfig(SaveConfigCallback):
    """``config.yaml`` in ``default_root_dir``, whatever the logger."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_to_log_dir = False

    def save_config(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Write it."""
        directory = Path(trainer.default_root_dir)
        if trainer.is_global_zero:
            directory.mkdir(parents=True, exist_ok=True)
            self.parser.save(self.config, directory / CONFIG_FILE, skip_none=False, overwrite=True)


class SFCLI(LightningCLI):
    """``fit`` with our callbacks in place."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Callbacks whose settings belong in the file, and the link from env to network."""
        parser.add_lightning_class_args(EnvStepCheckpoint, "checkpoint")
        parser.add_lightning_class_args(StatsReporter, "reports")
        parser.add_lightning_class_args(EnvStepsProgressBar, "progress")
        parser.link_arguments("data.env_specs", "model.env_specs", apply_on="instantiate")

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Only what makes sense here."""
        return {"fit": {"model", "train_dataloaders", "val_dataloaders", "datamodule"}}

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """With TensorBoard and CSV loggers where the config names none."""
        config = self.config_init[self.config_init["subcommand"]]["trainer"]
        if config["logger"] in (None, True):
            root = config["default_root_dir"]
            kwargs["logger"] = [
                TensorBoardLogger(root, name="tensorboard"),
                CSVLogger(root, name="csv"),
            ]
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(_Began())
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would read the file here, before it is known to be one of ours."""

    def before_instantiate_classes(self) -> None:
        """Resolve ``ckpt_path: last`` at once: a missing file is an error, never a fresh start."""
        config = self.config[self.config["subcommand"]]
        path = config.get("ckpt_path")
        if path is None:
            return
        if path == "last":
            directory = (
                config["checkpoint"]["dirpath"]
                or Path(config["trainer"]["default_root_dir"] or ".") / "checkpoints"
            )
            path = Path(directory) / LAST
        if not Path(path).is_file():
            raise UsageError(f"ckpt_path: there is no checkpoint {str(path)!r}")
        read_checkpoint(str(path))  # a foreign file is an error before anything starts
        config["ckpt_path"] = str(path)


def _fit(arguments: Sequence[str]) -> None:
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    cli = SFCLI(
        APPOModule,
        EnvDataModule,
        save_config_callback=_SaveConfig,
        save_config_kwargs={"overwrite": True},
        parser_class=_OneLineParser,
        parser_kwargs={
            "fit": {
                "description": "Train from YAML files and options; later ones win.",
                "usage": "sf-torchrl fit [--config FILE ...] [--option VALUE ...]",
            }
        },
        trainer_defaults={
            "max_epochs": -1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "default_root_dir": "runs/default",
            "accelerator": "cpu",
        },
        auto_configure_optimizers=False,  # LearnerConfig says; another one: override the method
        seed_everything_default=True,
        args=list(arguments),
    )
    if cli.trainer.is_global_zero:
        (saved,) = (c for c in cli.trainer.callbacks if isinstance(c, EnvStepCheckpoint))
        path = saved.directory(cli.trainer) / LAST
        print(f"done; try: sf-torchrl evaluate --checkpoint {path}")


def _run_function(function: Callable[..., None], summary: str, arguments: Sequence[str]) -> None:
    parser = _OneLineParser(prog=f"sf-torchrl {function.__name__}", description=summary)
    parser.add_function_arguments(function, skip={"json"})
    if function is evaluate:
        parser.add_argument(
            "--json", action="store_true", help="Print one JSON object as the last line."
        )
    parsed = parser.parse_args(list(arguments[1:]))
    function(**parsed.as_dict())


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "fit": _fit,
    "evaluate": partial(_run_function, evaluate, "Run episodes of a trained policy."),
    "play": partial(_run_function, play, "Record a video of a trained policy."),
}
_HELP = """usage: sf-torchrl {fit,evaluate,play} [options]

Train agents on one machine: Sample Factory's engine under PyTorch Lightning and TorchRL.

  fit       train from YAML and command line: sf-torchrl fit --config configs/cartpole.yaml
  evaluate  run a trained policy: sf-torchrl evaluate --checkpoint RUN/checkpoints/best.ckpt
  play      record a video of it: sf-torchrl play --checkpoint RUN/checkpoints/best.ckpt

sf-torchrl COMMAND --help lists every setting."""


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Returns:
        Exit code: 0 done, 1 the learner failed, 2 the command, config or env is wrong, 3 a worker
        process failed, 143 ended by SIGTERM.
    """
    _quiet()
    _Began.training = False
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP)
        return 0 if arguments else USAGE_ERROR
    try:
        command = arguments[0]
        if command not in _COMMANDS:
            close = difflib.get_close_matches(command, _COMMANDS, n=1, cutoff=0.3)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise UsageError(f"no command {command!r}: fit, evaluate or play{hint}")
        _COMMANDS[command](arguments)
    except SIGTERMException:
        return TERMINATED
    except Exception as error:
        return _explain(error)
    return 0


def _explain(error: Exception) -> int:
    """One line for what the user can mend, the traceback before it for what failed; exit code."""
    if isinstance(error, EnvError) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)  # the env's own
    if isinstance(error, WorkerError):
        return _fail(str(error), WORKER_FAILURE)
    if isinstance(error, RuntimeError):
        return _explain_runtime_error(error)
    # MisconfigurationException is Lightning's word for a setting that cannot be.
    usage = isinstance(error, (UsageError, EnvError, ValueError, MisconfigurationException))
    if usage and not _Began.training:
        return _fail(" ".join(str(error).split()), USAGE_ERROR)
    traceback.print_exception(error)
    return _fail(f"{type(error).__name__}: {error}", FAILURE)


def _explain_runtime_error(error: RuntimeError) -> int:
    reason, *lines = str(error).splitlines() or [""]
    if not reason.startswith("Error(s) in loading state_dict"):
        traceback.print_exception(error)
        return _fail(f"{type(error).__name__}: {error}", FAILURE)
    mismatches = " ".join(line.strip() for line in lines if "policy." in line)
    return _fail(
        f"ckpt_path: the checkpoint does not fit env and network: {mismatches}", USAGE_ERROR
    )


def _fail(message: str, code: int) -> int:
    print(f"sf-torchrl: error: {message}", file=sys.stderr)
    return code


def _quiet() -> None:
    """No advice from the libraries below that a user of this one cannot follow."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning.*")
