"""A run that was cut short and goes on ends where an uninterrupted one does."""

import lightning.pytorch as pl
import pytest
import torch

from sf_torchrl import ActorCritic, APPOModule, RolloutDataModule, SharedMemoryCollector
from sf_torchrl.callbacks.checkpoints import EnvStepCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\)")

TOTAL, BATCH = 320, 32


class Cut(pl.Callback):
    """Fails once a batch has been collected and before it has been trained on."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if pl_module.train_batches == self.at:
            raise RuntimeError("cut short")


def run(directory, *callbacks, ckpt_path=None):
    torch.manual_seed(0)
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,))
    collector = SharedMemoryCollector(
        "CartPole-v1",
        policy,
        frames_per_batch=BATCH,
        total_frames=TOTAL,
        num_workers=0,
        num_envs_per_worker=4,
        num_splits=1,
        rollout_length=8,
    )
    module = APPOModule(policy)
    trainer = pl.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
        callbacks=[EnvStepCheckpoint(), *callbacks],
    )
    trainer.fit(module, RolloutDataModule(collector), ckpt_path=ckpt_path, weights_only=True)
    return module


def test_a_run_cut_short_twice_trains_on_as_many_steps_as_one_that_was_not(tmp_path):
    with pytest.raises(RuntimeError, match="cut short"):
        run(tmp_path, Cut(3))
    with pytest.raises(RuntimeError, match="cut short"):
        run(tmp_path, Cut(6), ckpt_path="last")
    module = run(tmp_path, ckpt_path="last")
    assert (module.env_steps, module.policy_version) == (TOTAL, TOTAL // BATCH)


def test_a_run_that_has_ended_trains_on_nothing_more(tmp_path):
    run(tmp_path)
    module = run(tmp_path, ckpt_path="last")
    assert module.env_steps == TOTAL
