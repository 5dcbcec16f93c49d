"""What needs a GPU: ``pytest -m gpu``. Skipped where there is none."""

import lightning.pytorch as pl
import pytest
import torch

from sf_torchrl import ActorCritic, APPOLoss, APPOModule, RolloutDataModule, SharedMemoryCollector
from sf_torchrl.envs.factory import with_arguments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings("default"),
]
ENV = with_arguments("doom_basic", {"width": 64, "height": 48})


def make(core, precision, **settings):
    policy = ActorCritic.for_env(ENV, core=core, rnn_size=64, precision=precision)
    collector = SharedMemoryCollector(
        ENV,
        policy,
        frames_per_batch=512,
        num_workers=2,
        num_envs_per_worker=4,
        policy_device="cuda",
        seed=0,
        **settings,
    )
    return policy, collector


@pytest.mark.parametrize("core", ["none", "gru", "lstm"])
def test_a_batch_acted_on_the_gpu_has_ratio_one_on_the_gpu(core, family):
    policy, collector = make(core, "float32", async_mode=False, total_frames=1024)
    loss = APPOLoss(policy.cuda())
    for batch in collector:
        assert loss(batch.cuda())["ratio_deviation_max"] < 1e-3  # TF32 may be on
    collector.shutdown()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_inference_and_learner_run_on_the_gpu(precision, family, tmp_path):
    policy, collector = make("gru", precision, total_frames=4096)
    devices = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, *_):
            devices.append(batch.get("observation").device.type)

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=-1,
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        callbacks=[Note()],
    )
    module = APPOModule(policy)
    trainer.fit(module, RolloutDataModule(collector))
    assert devices == ["cuda"] * 8
    assert module.policy_version == 8
