"""The learner: a LightningModule that trains an actor-critic with APPO."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from tensordict import TensorDictBase
from torch import Tensor

from sf_torchrl.algorithms.lag import is_fresh
from sf_torchrl.algorithms.loss import APPOLoss
from sf_torchrl.config import (
    LearnerConfig,
    LossConfig,
    NetworkConfig,
    inference_and_learner_threads,
)
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.memory.weights import WeightStore
from sf_torchrl.models.actor_critic import ActorCritic
from sf_torchrl.models.pictures import PictureEncoder

_COUNTERS = ("policy_version", "env_steps", "train_batches", "skipped_minibatches")
_STATE = "sf_torchrl"  # the learner's own entry in a checkpoint


LAG_WINDOW = 100
"""Batches over which lag is reported."""


DIAGNOSTICS_EVERY_S = 0.5
"""Seconds between batches for which the loss's diagnostics are computed."""


class BatchLag(NamedTuple):
    """Lag of one batch, in policy versions."""

    mean: float
    max: int
    dropped_fraction: float


class APPOModule(pl.LightningModule):
    """Asynchronous PPO (Sample Factory's APPO) as a Lightning learner.

    Takes ``[B, T]`` TensorDict batches of any TorchRL collector that writes ``action_log_prob``
    and ``state_value``. Steps whose policy is too old are masked, and the weights are published
    after every optimizer step where a :class:`~sf_torchrl.WeightStore` is attached, which
    ``RolloutDataModule`` does.

    Args:
        policy: the actor-critic to train; None makes one from ``env_specs`` and ``network``.
        loss: coefficients of the loss.
        learner: optimizer, epochs, minibatches, lag.
        network: layers of the policy that is made here; unused if ``policy`` is given.
        env_specs: what the env observes and accepts; filled in by the command line.

    Raises:
        ValueError: neither ``policy`` nor ``env_specs`` is given.
    """

    def __init__(
        self,
        policy: ActorCritic | None = None,
        loss: LossConfig = LossConfig(),  # noqa: B008 (frozen)
        learner: LearnerConfig = LearnerConfig(),  # noqa: B008
        network: NetworkConfig = NetworkConfig(),  # noqa: B008
        env_specs: EnvSpecs | None = None,
    ) -> None:
        super().__init__()
        if policy is None:
            if env_specs is None:
                raise ValueError("APPOModule needs a policy, or env_specs to make one from")
            policy = ActorCritic(env_specs, network)
        self.automatic_optimization = False
        self.policy = policy
        self.loss = APPOLoss(policy, loss)
        self.learner = learner
        self.weight_store: WeightStore | None = None
        """Where weights are published; None publishes nowhere."""
        self.num_env_workers: int | None = None
        """Processes that step envs on the same machine; None if unknown."""
        self.policy_version = 0
        """Optimizer steps so far, those of resumed runs included."""
        self.env_steps = 0
        """Env steps in the batches trained on so far."""
        self.train_batches = 0
        """Batches so far."""
        self.skipped_minibatches = 0
        """Minibatches in which every step was masked: no optimizer step was taken."""
        self.recent_lag: deque[BatchLag] = deque(maxlen=LAG_WINDOW)
        """Lag of the last batches, oldest first."""
        self.busy_s = 0.0
        """Seconds spent in training steps in this process."""
        self.last_metrics: dict[str, Tensor] = {}
        """The newest losses and diagnostics, by their names in the logs."""
        self._next_diagnostics_s = 0.0
        self._minibatch_generator = torch.Generator()
        self._resumed = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with Sample Factory's settings; override for another."""
        learner = self.learner
        return torch.optim.Adam(
            self.policy.parameters(),
            lr=learner.learning_rate,
            betas=(learner.adam_beta1, learner.adam_beta2),
            eps=learner.adam_eps,
            fused=True,
        )

    def on_fit_start(self) -> None:
        """Set the number of threads and publish the weights the run begins with.

        Raises:
            ValueError: the trainer has a precision of its own.
        """
        if self.trainer.precision != "32-true":
            raise ValueError(
                f"trainer.precision={self.trainer.precision!r}: weights, losses and targets are "
                "float32; model.network.precision=bfloat16 computes the network in less"
            )
        threads = self.learner.learner_threads
        if not threads and self.num_env_workers is not None:
            threads = inference_and_learner_threads(self.num_env_workers)[1]
        if threads:
            self._use_threads(threads)
        if not self._resumed:
            self._minibatch_generator.manual_seed(torch.initial_seed() % 2**63)
        self.publish()

    def _use_threads(self, count: int) -> None:
        """Pictures are shared out among threads of ours, operations among torch's."""
        encoders = [part for part in self.policy.modules() if isinstance(part, PictureEncoder)]
        for encoder in encoders:
            encoder.num_threads = count
        torch.set_num_threads(1 if encoders else count)

    def training_step(self, batch: TensorDictBase, batch_idx: int) -> None:
        """``ppo_epochs`` passes over one batch, an optimizer step a minibatch."""
        began = time.perf_counter()
        self.loss.with_diagnostics = began >= self._next_diagnostics_s
        if self.loss.with_diagnostics:
            self._next_diagnostics_s = began + DIAGNOSTICS_EVERY_S
        self._mask_stale(batch)
        if not self.loss.config.with_vtrace:
            self.loss.returns(batch)
        last = self.learner.ppo_epochs * self.learner.num_minibatches - 1
        for index, minibatch in enumerate(self._minibatches(batch)):
            changed = self._optimizer_step(minibatch)
            if index == last:  # after all steps, yet published with the last: see the method
                changed = self._update_normalizer(batch) or changed
            if changed:
                self.publish()
        self.env_steps += batch.numel()
        self.train_batches += 1
        self.busy_s += time.perf_counter() - began

    def _mask_stale(self, batch: TensorDictBase) -> None:
        """Write ``mask`` where a step is stale. Lag is as of the batch's start."""
        version = batch.get("policy_version", None)
        if version is None:  # a collector that does not track versions: nothing is stale
            return
        # TorchRL's collectors count publications; ours write the learner's version.
        version = version.reshape(batch.batch_size) - getattr(self.weight_store, "offset", 0)
        lag = self.policy_version - version
        lowest, highest = (int(bound) for bound in lag.aminmax())
        dropped = 0.0
        if lowest < 0 or highest > self.learner.max_policy_lag:
            fresh = is_fresh(version, self.policy_version, self.learner.max_policy_lag)
            dropped = 1.0 - float(fresh.float().mean())
            given = self.loss.mask(batch)
            batch.set("mask", fresh if given is None else fresh & given)
        self.recent_lag.append(BatchLag(float(lag.sum()) / lag.numel(), highest, dropped))

    def _minibatches(self, batch: TensorDictBase) -> Iterator[TensorDictBase]:
        """Every minibatch of every pass; a minibatch is a part of the rollouts.

        Raises:
            ValueError: ``num_minibatches`` does not divide the rollouts of the batch.
        """
        count, rollouts = self.learner.num_minibatches, batch.batch_size[0]
        if rollouts % count:
            raise ValueError(
                f"num_minibatches={count} must divide the {rollouts} rollouts of a batch"
            )
        for _ in range(self.learner.ppo_epochs):
            if self.learner.shuffle_minibatches and count > 1:
                order = torch.randperm(rollouts, generator=self._minibatch_generator)
                yield from (batch[rows] for rows in order.chunk(count))
            elif count > 1:
                yield from batch.split(rollouts // count)
            else:
                yield batch

    def _optimizer_step(self, minibatch: TensorDictBase) -> bool:
        """One step on the unmasked steps, at a learning rate scaled by their share.

        Returns:
            False where every step is masked: nothing was done.
        """
        losses = self.loss(minibatch)
        self.last_metrics |= {f"train/{key}": value.detach() for key, value in losses.items()}
        share = float(losses["fresh_fraction"])
        if share == 0.0:
            self.skipped_minibatches += 1
            return False
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.zero_grad()
        self.manual_backward(
            losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        )
        if self.learner.max_grad_norm:
            self.last_metrics["train/grad_norm"] = torch.nn.utils.clip_grad_norm_(
                [p for group in optimizer.param_groups for p in group["params"]],
                self.learner.max_grad_norm,
            )
        with _scaled_learning_rate(optimizer.optimizer, share):
            optimizer.step()
        torch.clear_autocast_cache()  # a caller's autocast would keep the weights of before
        self.policy_version += 1
        return True

    def publish(self) -> None:
        """Make the current weights the newest in the weight store, if one is attached."""
        if self.weight_store is not None:
            self.weight_store.publish(self.policy, self.policy_version)

    def _update_normalizer(self, batch: TensorDictBase) -> bool:
        """After the optimizer steps, so that they saw observations as the acting policy did.

        Before the batch's last publication, so that the policy that acts on the next batch has
        the statistics that the learner will look at it with: the ratio at zero lag is one.

        Returns:
            Whether there are statistics, and an unmasked step to update them from.
        """
        normalizer = getattr(self.policy, "normalizer", None)
        if normalizer is None or not normalizer.active:
            return False
        mask = self.loss.mask(batch)
        if mask is not None and not bool(mask.any()):
            return False
        normalizer.update([batch.get(key) for key in self.loss.observation_keys], mask)
        return True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the counters."""
        checkpoint[_STATE] = {
            **{name: getattr(self, name) for name in _COUNTERS},
            "minibatch_generator": self._minibatch_generator.get_state(),
        }
        if hasattr(self.policy, "config"):  # evaluate rebuilds the network from it
            checkpoint[_STATE]["network"] = _plain(dataclasses.asdict(self.policy.config))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the counters back."""
        state = checkpoint[_STATE]
        for name in _COUNTERS:
            setattr(self, name, int(state[name]))
        self._minibatch_generator.set_state(state["minibatch_generator"].cpu())
        self._resumed = True


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


class _scaled_learning_rate:
    """The learning rate of every group times ``factor``, for one optimizer step."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        self._groups = optimizer.param_groups if factor != 1.0 else []
        self._factor = factor

    def __enter__(self) -> None:
        self._rates = [group["lr"] for group in self._groups]
        for group in self._groups:
            group["lr"] *= self._factor

    def __exit__(self, *_: object) -> None:
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
