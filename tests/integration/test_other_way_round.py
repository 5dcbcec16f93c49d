"""TorchRL's own collectors feed our loss and our learner, under Lightning."""

import lightning.pytorch as pl
import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs import GymEnv, SerialEnv

from sf_torchrl import ActorCritic, APPOModule, RolloutDataModule
from sf_torchrl.algorithms.loss import APPOLoss
from sf_torchrl.config import LearnerConfig, LossConfig

pytestmark = pytest.mark.filterwarnings("ignore")

NUM_ENVS, T = 4, 8


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def several():
    return SerialEnv(NUM_ENVS, cartpole)


def policy():
    return ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,))


@pytest.mark.parametrize("with_vtrace", [True, False])
def test_the_loss_takes_batches_of_torchrls_collector(with_vtrace):
    torch.manual_seed(0)
    network = policy()
    loss = APPOLoss(network, LossConfig(with_vtrace=with_vtrace))
    collector = Collector(several(), network, frames_per_batch=NUM_ENVS * T, total_frames=64)
    for batch in collector:
        if not with_vtrace:
            loss.returns(batch)
        losses = loss(batch)
        assert all(torch.isfinite(value) for value in losses.values())
        assert losses["fresh_fraction"] == 1.0
    collector.shutdown()


def fit(collector, network, **learner):
    module = APPOModule(network, learner=LearnerConfig(**learner))
    trainer = pl.Trainer(
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = [parameter.clone() for parameter in network.parameters()]
    trainer.fit(module, RolloutDataModule(collector))
    assert all((a != b).any() for a, b in zip(before, network.parameters(), strict=True))
    return module


def test_the_learner_trains_on_torchrls_collector_to_its_end():
    network = policy()
    collector = Collector(several(), network, frames_per_batch=NUM_ENVS * T, total_frames=320)
    module = fit(collector, network, ppo_epochs=2)
    assert (module.env_steps, module.train_batches, module.policy_version) == (320, 10, 20)


def test_versions_of_torchrls_collector_are_understood():
    """It counts publications, the learner optimizer steps: fresh steps are not taken for stale.

    But the first step of a batch: TorchRL labels it when the step before it ends, before the
    weights are renewed.
    """
    network = policy()
    collector = Collector(
        cartpole(),
        network,
        frames_per_batch=32,
        total_frames=320,
        track_policy_version=True,
        postproc=lambda batch: batch.unsqueeze(0),  # one env alone gives [T]
    )
    module = fit(collector, network, ppo_epochs=3, max_policy_lag=0)
    assert module.policy_version == 30
    assert [lag.dropped_fraction * 32 for lag in module.recent_lag] == [1.0] * 10


@pytest.mark.multiprocess
def test_the_learner_trains_on_multi_async_collector():
    network = policy()
    collector = MultiAsyncCollector(
        [several], network, frames_per_batch=NUM_ENVS * T, total_frames=320
    )
    module = fit(collector, network)
    assert module.env_steps >= 320
