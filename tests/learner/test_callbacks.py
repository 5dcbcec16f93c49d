"""Checkpoints, reports and progress bar, as seen from outside: files and text."""

import contextlib
import csv
import io
import logging
import os
import re
import sys
import threading
import zipfile

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tensordict import TensorDict

from sf_torchrl.callbacks.checkpoints import EnvStepCheckpoint
from sf_torchrl.callbacks.progress import EnvStepsProgressBar
from sf_torchrl.callbacks.reports import StatsReporter
from sf_torchrl.data import RolloutDataModule
from sf_torchrl.memory.weights import WeightStore
from sf_torchrl.models.actor_critic import ActorCritic
from sf_torchrl.module import APPOModule

pytestmark = pytest.mark.filterwarnings(
    # Lightning's progress over batches, with torch 2.13.
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)

ALWAYS, NEVER = 1e-9, 1e9
STEPS = 8 * 6  # env steps in one batch


def make_policy(units=16):
    torch.manual_seed(0)
    return ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(units,))


class Scripted:
    """A collector of random batches whose statistics are as given, one entry a batch."""

    def __init__(self, policy, stats):
        self.policy = policy
        self.weight_store = WeightStore(policy)
        self.script = stats
        self.read = 0
        self.total_frames = STEPS * len(stats)

    def __len__(self):
        return len(self.script)

    @torch.no_grad()
    def __iter__(self):
        for _ in self.script:
            self.read += 1
            batch = TensorDict({"observation": torch.randn(8, 6, 4)}, batch_size=[8, 6])
            batch = self.policy(batch)
            batch["next"] = TensorDict(
                {
                    "observation": torch.randn(8, 6, 4),
                    "reward": torch.randn(8, 6, 1),
                    "done": torch.zeros(8, 6, 1, dtype=torch.bool),
                    "terminated": torch.zeros(8, 6, 1, dtype=torch.bool),
                },
                batch_size=[8, 6],
            )
            # Lags 0, 2, 0, 2, ... once there are so many versions.
            version = torch.arange(6) % 2 * -min(2, self.read - 1) + self.read - 1
            batch["policy_version"] = version.expand(8, 6).clone()
            yield batch

    def stats(self):
        return self.script[max(self.read, 1) - 1]

    def shutdown(self):
        pass


def returns(*values, episodes=100):
    """Statistics of batches in which the last episodes came to these mean returns."""
    return [{"mean_return": value, "recent_episodes": episodes} for value in values]


class Look(pl.Callback):
    """Calls a function before each batch: what the batch before it left is in place by then."""

    def __init__(self, function):
        self.function = function

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.function(batch_idx)


class Broken(APPOModule):
    fail_at = 2

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise RuntimeError("the learner broke")
        super().training_step(batch, batch_idx)


def fit(path, stats, *callbacks, learner=APPOModule, units=16, frame_skip=1, **kwargs):
    policy = make_policy(units)
    module = learner(policy)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        default_root_dir=path,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{
            "logger": False,
            "log_every_n_steps": 1,
            "enable_progress_bar": any(isinstance(c, EnvStepsProgressBar) for c in callbacks),
            "enable_checkpointing": any(isinstance(c, EnvStepCheckpoint) for c in callbacks),
        }
        | kwargs,
    )
    data = RolloutDataModule(Scripted(policy, stats), frame_skip=frame_skip)
    trainer.fit(module, datamodule=data)
    return module


def env_steps_in(path):
    """Env steps of a checkpoint; None where there is none."""
    if not path.exists():
        return None
    return torch.load(path, weights_only=True)["sf_torchrl"]["env_steps"]


# Checkpoints


def test_at_the_end_there_are_the_last_the_best_and_the_newest_few(tmp_path):
    fit(tmp_path, returns(1, 2, 3, 4, 5), EnvStepCheckpoint(save_every_s=ALWAYS))
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.ckpt",
        "env_steps-000000000192.ckpt",
        "env_steps-000000000240.ckpt",
        "last.ckpt",
    ]  # and nothing temporary
    assert env_steps_in(folder / "last.ckpt") == 5 * STEPS
    assert env_steps_in(folder / "best.ckpt") == 5 * STEPS
    assert env_steps_in(folder / "env_steps-000000000192.ckpt") == 4 * STEPS


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_as_many_periodic_checkpoints_are_kept_as_asked_for(tmp_path, keep):
    callback = EnvStepCheckpoint(save_every_s=ALWAYS, keep_checkpoints=keep)
    fit(tmp_path, returns(*[0] * 5), callback)
    kept = sorted((tmp_path / "checkpoints").glob("env_steps-*"))
    assert [env_steps_in(path) for path in kept] == [i * STEPS for i in range(1, 6)][5 - keep :]


def test_nothing_is_saved_before_it_is_time_but_the_end_is(tmp_path):
    seen = []
    folder = tmp_path / "run"
    callback = EnvStepCheckpoint(str(folder), save_every_s=NEVER, save_best_every_s=NEVER)
    fit(tmp_path, returns(1, 2, 3), callback, Look(lambda _: seen.extend(folder.iterdir())))
    assert seen == []
    assert env_steps_in(folder / "last.ckpt") == 3 * STEPS
    assert env_steps_in(folder / "best.ckpt") == 3 * STEPS


def test_the_best_is_replaced_only_by_a_better_one(tmp_path):
    """Better by 1e-3 at least, which is Sample Factory's."""
    best = []
    path = tmp_path / "checkpoints" / "best.ckpt"
    callback = EnvStepCheckpoint(save_every_s=NEVER, save_best_every_s=ALWAYS)
    mean_returns = returns(-5, -7, 3, 3.0005, 2, 3.1, 3.1)
    fit(tmp_path, mean_returns, callback, Look(lambda _: best.append(env_steps_in(path))))
    best.append(env_steps_in(path))
    assert best == [None, *[STEPS * i for i in (1, 1, 3, 3, 3, 6, 6)]]
    assert callback.best_mean_return == 3.1


@pytest.mark.parametrize(
    ("stats", "after"),
    [(returns(9, 9, episodes=99), 0), ([{}, {}], 0), (returns(9, 9), 2 * STEPS + 1)],
    ids=["too few episodes", "no episode", "too early"],
)
def test_nothing_is_the_best_too_early(tmp_path, stats, after):
    callback = EnvStepCheckpoint(save_best_every_s=ALWAYS, save_best_after=after)
    fit(tmp_path, stats, callback)
    assert not (tmp_path / "checkpoints" / "best.ckpt").exists()


def test_a_resumed_run_does_not_replace_a_better_checkpoint(tmp_path):
    fit(tmp_path, returns(5), EnvStepCheckpoint())
    folder = tmp_path / "checkpoints"
    policy = make_policy()
    module = APPOModule(policy)
    callback = EnvStepCheckpoint(save_best_every_s=ALWAYS)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    data = RolloutDataModule(Scripted(policy, returns(4, 4.5)))
    trainer.fit(module, datamodule=data, ckpt_path="last")
    assert callback.best_mean_return == 5.0
    assert env_steps_in(folder / "best.ckpt") == STEPS
    assert env_steps_in(folder / "last.ckpt") == module.env_steps > STEPS


def test_every_file_under_its_own_name_is_whole_at_any_moment(tmp_path):
    """Files are large here, so that a reader would meet a half-written one."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ended, whole, broken = threading.Event(), set(), set()

    def read_all():
        while not ended.is_set():
            for name in os.listdir(folder):
                if name.startswith("."):
                    continue
                with contextlib.suppress(FileNotFoundError), open(folder / name, "rb") as file:
                    # A checkpoint is an archive, whose directory is at its end.
                    (whole if zipfile.is_zipfile(file) else broken).add(name)

    reader = threading.Thread(target=read_all)
    reader.start()
    try:
        callback = EnvStepCheckpoint(save_every_s=ALWAYS, save_best_every_s=ALWAYS)
        fit(tmp_path, returns(*range(12)), callback, units=50_000)
    finally:
        ended.set()
        reader.join()
    assert broken == set()
    assert {"last.ckpt", "best.ckpt"} < whole
    assert len(whole) > 2 + 2  # periodic ones too, more than are kept


def test_a_failed_write_leaves_the_file_before_it(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    writes = 0
    save = pl.Trainer.save_checkpoint

    def disk_full_at_third_write(trainer, path, *args, **kwargs):
        nonlocal writes
        writes += 1
        if writes >= 3:
            with open(path, "wb") as file:
                file.write(b"half")
            raise OSError("No space left on device")
        save(trainer, path, *args, **kwargs)

    monkeypatch.setattr(pl.Trainer, "save_checkpoint", disk_full_at_third_write)
    callback = EnvStepCheckpoint(save_every_s=ALWAYS, save_best_every_s=NEVER)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, [{}] * 5, callback)
    assert env_steps_in(folder / "last.ckpt") == 2 * STEPS


def test_a_crash_in_training_leaves_what_was_reached(tmp_path):
    callback = EnvStepCheckpoint(save_every_s=NEVER)
    with pytest.raises(RuntimeError, match="the learner broke"):
        fit(tmp_path, [{}] * 5, callback, learner=Broken)
    (path,) = (tmp_path / "checkpoints").iterdir()
    assert path.name == "last.ckpt"
    saved = torch.load(path, weights_only=True)
    assert saved["sf_torchrl"]["env_steps"] == 2 * STEPS
    assert saved["sf_torchrl"]["policy_version"] == saved["global_step"] == 2


def test_a_crash_before_the_first_step_does_not_replace_an_older_checkpoint(tmp_path):
    class BrokenAtOnce(Broken):
        fail_at = 0

    fit(tmp_path, [{}] * 3, EnvStepCheckpoint())
    with pytest.raises(RuntimeError, match="the learner broke"):
        fit(tmp_path, [{}], EnvStepCheckpoint(), learner=BrokenAtOnce)
    assert env_steps_in(tmp_path / "checkpoints" / "last.ckpt") == 3 * STEPS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_every_s", 0),
        ("save_best_every_s", -1.0),
        ("keep_checkpoints", -1),
        ("save_best_after", -1),
    ],
)
def test_impossible_settings_are_refused_with_their_value(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}"):
        EnvStepCheckpoint(**{name: value})


# Reports

WORKING = {
    "mean_return": 12.34,
    "mean_length": 20.5,
    "episodes": 7,
    "recent_episodes": 7,
    "env_workers_waited_s": 0.0,
    "inference_waited_s": 0.0,
}
DOCUMENTED = {
    "throughput/env_steps_per_s",
    "throughput/env_frames_per_s",
    "busy/env_workers",
    "busy/inference_worker",
    "busy/learner",
    "collect/mean_return",
    "collect/mean_length",
    "collect/episodes",
    "lag/mean",
    "lag/max",
    "lag/dropped_fraction",
    "train/loss_objective",
    "train/loss_critic",
    "train/loss_entropy",
    "train/fresh_fraction",
    "train/entropy",
    "train/clip_fraction",
    "train/kl_approx",
    "train/ratio_deviation_max",
    "train/value",
    "train/value_target",
    "train/grad_norm",
    "train/policy_version",
    "train/skipped_minibatches",
    "time/since_process_start_s",
}


def logged(path):
    (file,) = path.rglob("metrics.csv")
    return list(csv.DictReader(file.read_text().splitlines()))


def test_every_documented_name_is_logged_against_env_steps(tmp_path):
    fit(tmp_path, [WORKING] * 4, StatsReporter(ALWAYS), logger=CSVLogger(tmp_path))
    rows = logged(tmp_path)
    assert set(rows[0]) == DOCUMENTED | {"step"}
    assert [int(row["step"]) for row in rows] == [STEPS * i for i in (1, 2, 3, 4, 4)]
    assert all(float(row[name]) == float(row[name]) for row in rows for name in DOCUMENTED)
    assert [float(row["train/policy_version"]) for row in rows] == [1, 2, 3, 4, 4]
    for row in rows:
        assert float(row["collect/mean_return"]) == 12.34
        assert float(row["collect/mean_length"]) == 20.5
        assert float(row["collect/episodes"]) == 7
        assert all(0 <= float(row[name]) <= 1 for name in DOCUMENTED if name.startswith("busy/"))
        assert float(row["train/fresh_fraction"]) == 1.0


def test_lag_is_that_of_the_batches_so_far(tmp_path):
    fit(tmp_path, [WORKING] * 4, StatsReporter(ALWAYS), logger=CSVLogger(tmp_path))
    rows = logged(tmp_path)
    # Half the steps of each batch are 0, 1, 2 and 2 versions old.
    assert [float(row["lag/mean"]) for row in rows] == [0, 0.25, 0.5, 0.625, 0.625]
    assert [float(row["lag/max"]) for row in rows] == [0, 1, 2, 2, 2]
    assert [float(row["lag/dropped_fraction"]) for row in rows] == [0] * 5


def test_env_steps_are_exact_beyond_what_float32_can_count(tmp_path):
    class Late(APPOModule):
        def on_fit_start(self):
            super().on_fit_start()
            self.env_steps = 2**53 + 1

    fit(tmp_path, [{}] * 2, StatsReporter(ALWAYS), learner=Late, logger=CSVLogger(tmp_path))
    first = 2**53 + 1 + STEPS
    assert [int(row["step"]) for row in logged(tmp_path)] == [first, first + STEPS, first + STEPS]


def test_before_its_time_only_the_end_is_reported(tmp_path):
    fit(tmp_path, [WORKING] * 4, StatsReporter(NEVER), logger=CSVLogger(tmp_path))
    assert [int(row["step"]) for row in logged(tmp_path)] == [4 * STEPS]


def test_without_an_episode_there_is_no_return_and_no_nan(tmp_path):
    fit(tmp_path, [{"episodes": 0}] * 2, StatsReporter(ALWAYS), logger=CSVLogger(tmp_path))
    for row in logged(tmp_path):
        assert "collect/mean_return" not in row
        assert "nan" not in row.values()


def test_frames_are_steps_times_frame_skip(tmp_path):
    reporter = StatsReporter(ALWAYS)
    fit(tmp_path, [WORKING] * 2, reporter, frame_skip=4, logger=CSVLogger(tmp_path))
    for row in logged(tmp_path):
        steps, frames = (float(row[f"throughput/env_{x}_per_s"]) for x in ("steps", "frames"))
        assert frames == pytest.approx(4 * steps)


def test_a_period_of_zero_is_refused():
    with pytest.raises(ValueError, match="every_s=0 must be positive"):
        StatsReporter(0)


# The progress bar


def test_the_progress_bar_says_how_far_how_fast_how_well_and_what_limits(tmp_path, capsys):
    fit(tmp_path, [WORKING] * 3, EnvStepsProgressBar(), frame_skip=4)
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second, third = captured.err.splitlines()  # the end; earlier is too early
    assert re.fullmatch(r"100% █{20} 144/144 env steps  0:00<0:00", first)
    speed = re.fullmatch(
        r"  ([\d,]+) env steps/s  ([\d,]+) env frames/s  \|  return 12\.34  length 20\.5",
        second,
    )
    steps, frames = (int(number.replace(",", "")) for number in speed.groups())
    assert frames == pytest.approx(4 * steps, abs=4)
    assert re.fullmatch(
        r"  lag 0\.5 max 2  \|  busy: env workers \d+%, inference \d+%, learner \d+%",
        third,
    )


def test_a_file_gets_plain_lines(tmp_path, capsys):
    class Impatient(EnvStepsProgressBar):
        def on_train_start(self, *args):
            super().on_train_start(*args)
            self._next_s = 0.0

    fit(tmp_path, [{}] * 3, Impatient(every_s_in_files=ALWAYS))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[2] for line in lines[::3]] == [
        f"{STEPS * i}/{3 * STEPS}" for i in (1, 2, 3, 3)
    ]
    assert all("no episode finished yet" in line for line in lines[1::3])
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_on_a_terminal_the_three_lines_are_rewritten_in_place(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    class Impatient(EnvStepsProgressBar):
        def on_train_start(self, *args):
            super().on_train_start(*args)
            self._next_s = 0.0

    monkeypatch.setattr(sys, "stderr", Terminal())
    fit(tmp_path, [WORKING] * 3, Impatient(every_s=ALWAYS))
    frames = sys.stderr.getvalue().split("\x1b[3F\x1b[J")
    assert len(frames) == 4  # three batches and the end, each over the one before
    assert all(frame.count("\n") == 3 for frame in frames)


def test_a_resume_that_fails_does_not_replace_the_checkpoint(tmp_path):
    """Its counters were taken back before its weights turned out not to fit."""
    fit(tmp_path, [{}] * 3, EnvStepCheckpoint())
    path = tmp_path / "checkpoints" / "last.ckpt"
    before = path.read_bytes()
    policy = make_policy(units=32)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EnvStepCheckpoint()],
    )
    data = RolloutDataModule(Scripted(policy, [{}]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        trainer.fit(APPOModule(policy), datamodule=data, ckpt_path="last")
    assert path.read_bytes() == before


def test_the_collector_is_shut_down_though_the_disk_is_full(tmp_path, monkeypatch):
    ended = []

    def disk_full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(Scripted, "shutdown", lambda self: ended.append(self))
    monkeypatch.setattr(pl.Trainer, "save_checkpoint", disk_full)
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, [{}] * 5, EnvStepCheckpoint(save_every_s=ALWAYS))
    assert ended


def test_a_fast_dev_run_saves_nothing(tmp_path):
    fit(tmp_path, [{}] * 3, EnvStepCheckpoint(save_every_s=ALWAYS), fast_dev_run=True)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_reports_can_be_read_while_the_run_goes_on(tmp_path):
    """A killed run leaves what it logged."""
    rows = []
    look = Look(lambda batch_idx: rows.append(len(logged(tmp_path)) if batch_idx else 0))
    fit(tmp_path, [WORKING] * 4, StatsReporter(ALWAYS), look, logger=CSVLogger(tmp_path))
    assert rows == [0, 1, 2, 3]


def test_a_run_that_is_not_continued_keeps_its_checkpoints_aside(tmp_path, capsys):
    fit(tmp_path, [{}] * 3, EnvStepCheckpoint())
    first = (tmp_path / "checkpoints" / "last.ckpt").read_bytes()
    fit(tmp_path, [{}] * 2, EnvStepCheckpoint())
    assert (tmp_path / "checkpoints-1" / "last.ckpt").read_bytes() == first
    assert (tmp_path / "checkpoints" / "last.ckpt").read_bytes() != first
    assert "checkpoints-1" in capsys.readouterr().err
