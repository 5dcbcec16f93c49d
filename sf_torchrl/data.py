"""Collectors as Lightning data: batches of rollouts under a ``Trainer``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector

from sf_torchrl.collector import SharedMemoryCollector
from sf_torchrl.config import CollectorConfig
from sf_torchrl.envs.factory import with_arguments
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.envs.try_out import try_out

_SPARE_BATCHES = 1_000
"""Interrupts that a run may survive before Lightning's count of batches ends it early."""


class RolloutLoader:
    """A collector as Lightning wants to read it: with a length, so that nothing is prefetched.

    Lightning fetches one batch ahead from iterables without a length, which would add to the lag
    and lose a batch on resume.

    Args:
        collector: where batches come from; iterating again goes on where it stopped.
        num_batches: batches in one pass (a Lightning epoch).
        on_end: called when the collector has no more batches.
    """

    def __init__(
        self, collector: BaseCollector, num_batches: int, on_end: Callable[[], None]
    ) -> None:
        self.collector = collector
        self._num_batches = num_batches
        self._on_end = on_end
        self._batches: Iterator[TensorDictBase] | None = None

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[TensorDictBase]:
        if self._batches is None:
            self._batches = iter(self.collector)
        for _ in range(self._num_batches):
            batch = next(self._batches, None)
            if batch is None:
                self._on_end()
                return
            yield batch
        if self._is_finished():
            self._on_end()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module saves the collector's counters. It tells Lightning that."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def _is_finished(self) -> bool:
        """The collector has given all it was asked for; names are TorchRL's."""
        frames = getattr(self.collector, "_frames", 0)
        return bool(frames >= getattr(self.collector, "total_frames", float("inf")))


class RolloutDataModule(pl.LightningDataModule):
    """Any TorchRL collector under a Lightning ``Trainer``.

    Attaches the collector's weight store to the learner, so that each optimizer step publishes;
    for collectors of TorchRL it calls ``update_policy_weights_``. Ends the run with the
    collector's ``total_frames``, and shuts the collector down however the run ends.

    Args:
        collector: yields ``[B, T]`` batches.
        batches_per_epoch: batches in one Lightning epoch; None makes the whole run one epoch, or
            1000 batches where the collector has no end.
        frame_skip: simulator frames in one env step; for reports alone.

    Raises:
        ValueError: a number is not positive.
    """

    def __init__(
        self,
        collector: BaseCollector,
        batches_per_epoch: int | None = None,
        frame_skip: int = 1,
    ) -> None:
        super().__init__()
        self._collector: BaseCollector | None = collector
        self._set_up(batches_per_epoch, frame_skip)

    def _set_up(self, batches_per_epoch: int | None, frame_skip: int) -> None:
        if batches_per_epoch is not None and batches_per_epoch < 1:
            raise ValueError(f"batches_per_epoch={batches_per_epoch} must be at least 1")
        if frame_skip < 1:
            raise ValueError(f"frame_skip={frame_skip} must be at least 1")
        self.batches_per_epoch = batches_per_epoch
        self.frame_skip = frame_skip
        self._copy_stream: Any = None

    @property
    def collector(self) -> BaseCollector:
        """The collector that batches come from."""
        assert self._collector is not None, "made in setup('fit')"
        return self._collector

    def setup(self, stage: str) -> None:
        """Attach the collector's weights to the learner."""
        module = self.trainer.lightning_module if self.trainer else None
        if stage != "fit" or module is None or not hasattr(module, "weight_store"):
            return
        self._check_minibatches(module)
        store = getattr(self.collector, "weight_store", None)
        config = getattr(self.collector, "config", None)
        if isinstance(self.collector, SharedMemoryCollector):
            self.collector.pin_memory = self.trainer.strategy.root_device.type == "cuda"
        if isinstance(config, CollectorConfig):
            module.num_env_workers = config.num_workers
        module.weight_store = _TorchRLWeights(self.collector) if store is None else store

    def _check_minibatches(self, module: Any) -> None:
        """Before any process starts.

        Raises:
            ValueError: ``num_minibatches`` does not divide the rollouts of a batch.
        """
        config = getattr(self.collector, "config", None)
        count = getattr(getattr(module, "learner", None), "num_minibatches", 1)
        if isinstance(config, CollectorConfig) and config.rollouts_per_batch % count:
            raise ValueError(
                f"num_minibatches={count} must divide the {config.rollouts_per_batch} rollouts of "
                f"a batch (frames_per_batch={config.frames_per_batch} / "
                f"rollout_length={config.rollout_length})"
            )

    def train_dataloader(self) -> RolloutLoader:
        """The collector, as Lightning reads it.

        Where a run goes on, the learner's count of env steps is what is left to reach: a batch
        that an interrupt cost is collected again, and Lightning's own count of batches, which has
        it as done, must not end the epoch.
        """
        length = self._epoch_length()
        trained = getattr(self.trainer.lightning_module, "env_steps", 0) if self.trainer else 0
        if trained and isinstance(self.collector, SharedMemoryCollector):
            self.collector.count_from(trained)
            length += _SPARE_BATCHES
        return RolloutLoader(self.collector, length, self._end_run)

    def _epoch_length(self) -> int:
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        try:
            return len(self.collector)
        except (TypeError, RuntimeError):  # no end: RuntimeError is TorchRL's
            return 1000

    def _end_run(self) -> None:
        if self.trainer is not None:
            self.trainer.should_stop = True

    def transfer_batch_to_device(
        self, batch: TensorDictBase, device: torch.device, dataloader_idx: int
    ) -> TensorDictBase:
        """Move a batch; on CPUs nothing is done, since the batch is the caller's own.

        To a GPU on a stream of its own: the copy runs beside what the learner has still to compute.
        """
        if device.type == "cpu":
            return batch
        if device.type != "cuda":
            return batch.to(device)
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        now = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._copy_stream):
            moved = batch.to(device, non_blocking=True)
        now.wait_stream(self._copy_stream)
        for value in moved.values(True, True):
            value.record_stream(now)  # not to be reused while the learner reads it
        return moved

    def state_dict(self) -> dict[str, Any]:
        """The collector's counters, in plain values."""
        state: dict[str, Any] = getattr(self._collector, "state_dict", dict)()
        plain = (bool, int, float, str)
        return {key: value for key, value in state.items() if isinstance(value, plain)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the collector's counters."""
        if hasattr(self.collector, "weight_store"):
            self.collector.load_state_dict(state_dict)
        elif "_frames" in vars(self.collector) and "frames" in state_dict:
            self.collector._frames = state_dict["frames"]  # TorchRL's own count

    def teardown(self, stage: str) -> None:
        """End the collector's processes after a run."""
        self._shutdown()

    def on_exception(self, exception: BaseException) -> None:
        """End the collector's processes after a crash or Ctrl-C: teardown is not called then."""
        self._shutdown()

    def _shutdown(self) -> None:
        if self._collector is not None:
            self._collector.shutdown()


class EnvDataModule(RolloutDataModule):
    """Rollouts of an environment through shared memory: the command line's data.

    Args:
        env: gymnasium env id, one of this package's (``doom_SCENARIO``, ``atari_GAME``,
            ``memory_tmaze``), or ``module:function`` where the function makes one env.
        env_kwargs: keyword arguments of the env, such as frame_skip.
        env_steps: env steps at which the run ends, those of resumed runs included.
        collector: how experience is gathered.
        frame_skip: simulator frames in one env step, for reports alone; None takes what the env
            says of itself (``metadata["frame_skip"]``), or 1.
        batches_per_epoch: batches in one Lightning epoch; None makes the whole run one epoch.

    Raises:
        ValueError: the env is unknown, cannot be made, or has an unsupported space.
    """

    def __init__(
        self,
        env: str,
        env_steps: int = 1_000_000,
        collector: CollectorConfig = CollectorConfig(),  # noqa: B008 (frozen)
        frame_skip: int | None = None,
        batches_per_epoch: int | None = None,
        env_kwargs: dict[str, Any] | None = None,
    ) -> None:
        pl.LightningDataModule.__init__(self)
        if env_steps < 1:
            raise ValueError(f"env_steps={env_steps} must be at least 1")
        self._collector = None
        self.env = with_arguments(env, env_kwargs or {})
        self.env_steps = env_steps
        self.config = collector
        self.env_specs: EnvSpecs = try_out(self.env)
        self._set_up(
            batches_per_epoch, self.env_specs.frame_skip if frame_skip is None else frame_skip
        )

    def setup(self, stage: str) -> None:
        """Make the collector, with the learner's policy; a new one for each ``fit``."""
        if stage == "fit":
            assert self.trainer is not None
            self._collector = SharedMemoryCollector(
                self.env,
                self.trainer.lightning_module.policy,
                total_frames=self.env_steps,
                seed=torch.initial_seed() + self.trainer.global_rank,
                **dataclasses.asdict(self.config),
            )
        super().setup(stage)


class _TorchRLWeights:
    """The publishing half of a weight store, for a collector that has none of ours."""

    def __init__(self, collector: BaseCollector) -> None:
        self._collector = collector
        self._publications = 0
        self.offset = 0
        """Version that the collector writes, minus the learner's."""

    def publish(self, policy: Any, version: int) -> None:
        """Renew the collector's weights; it counts versions itself, if at all.

        As a TensorDict: given a module of several parts, TorchRL 0.14.1's Collector raises.
        """
        self._collector.update_policy_weights_(TensorDict.from_module(policy).data)
        self._publications += 1
        self.offset = self._publications - version
