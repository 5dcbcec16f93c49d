"""Settings: names, defaults, units and checks. Names follow Sample Factory where it has one."""

from __future__ import annotations

from dataclasses import dataclass


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """How experience is gathered."""

    num_workers: int = 2
    """Env processes. 0 does everything in the main process, one thing after the other: bit-for-bit
    reproducible, and the fast way for very cheap envs on few cores."""
    num_envs_per_worker: int = 8
    """Envs stepped in series by one worker, shared among its splits."""
    num_splits: int = 2
    """Groups of envs per worker; 2 is double buffering: one is stepped while the other waits for
    actions. Divides num_envs_per_worker. Sample Factory's worker_num_splits."""
    rollout_length: int = 32
    """Env steps in one rollout, skipped frames not counted. Sample Factory's rollout."""
    frames_per_batch: int = 1024
    """Env steps in one batch; whole rollouts. Sample Factory's batch_size times
    num_batches_per_epoch."""
    max_batches_in_flight: int = 2
    """Batches being collected or waiting for the learner before workers pause: bounds the lag.
    Every split holds two rollouts at the least, so few steps a batch over many envs are more.
    Sample Factory's num_batches_to_accumulate."""
    async_mode: bool = True
    """Collect while the learner learns. False waits for it: every step's policy_version is then
    the learner's (zero lag). Sample Factory's async_rl."""
    env_start_timeout_s: float = 120.0
    """Seconds within which every env must have been made and reset."""
    inference_threads: int = 1
    """Threads of the inference worker."""

    def __post_init__(self) -> None:
        for name in (
            "num_envs_per_worker",
            "num_splits",
            "rollout_length",
            "frames_per_batch",
            "max_batches_in_flight",
            "inference_threads",
        ):
            value = getattr(self, name)
            _check(value >= 1, f"{name}={value} must be at least 1")
        _check(self.num_workers >= 0, f"num_workers={self.num_workers} must not be negative")
        _check(
            self.env_start_timeout_s > 0,
            f"env_start_timeout_s={self.env_start_timeout_s} must be positive",
        )
        _check(
            self.num_envs_per_worker % self.num_splits == 0,
            f"num_splits={self.num_splits} must divide "
            f"num_envs_per_worker={self.num_envs_per_worker}",
        )
        _check(
            self.frames_per_batch % self.rollout_length == 0,
            f"frames_per_batch={self.frames_per_batch} must be a multiple of "
            f"rollout_length={self.rollout_length}: a batch is made of whole rollouts",
        )
        if not self.async_mode:
            _check(
                self.frames_per_batch % self.steps_per_sweep == 0,
                f"with async_mode=False every env gives the same number of rollouts to a batch: "
                f"frames_per_batch={self.frames_per_batch} must be a multiple of "
                f"num_envs*rollout_length={self.steps_per_sweep}",
            )

    @property
    def num_envs(self) -> int:
        """Envs of all workers."""
        return max(self.num_workers, 1) * self.num_envs_per_worker

    @property
    def envs_per_split(self) -> int:
        """Envs stepped together; ``k``."""
        return self.num_envs_per_worker // self.num_splits

    @property
    def total_splits(self) -> int:
        """Splits of all workers."""
        return max(self.num_workers, 1) * self.num_splits

    @property
    def steps_per_sweep(self) -> int:
        """Env steps in one rollout of every env."""
        return self.num_envs * self.rollout_length

    @property
    def rollouts_per_batch(self) -> int:
        """Rollouts in one batch; ``B``."""
        return self.frames_per_batch // self.rollout_length

    @property
    def num_slots_per_split(self) -> int:
        """Rollouts a split can hold unread: what bounds the lag of async collection."""
        if not self.async_mode:
            return self.frames_per_batch // self.steps_per_sweep
        if self.num_workers == 0:
            return 1  # read as soon as they are full
        in_flight = self.max_batches_in_flight * self.frames_per_batch
        return max(2, -(-in_flight // self.steps_per_sweep))

    @property
    def num_slots(self) -> int:
        """Slots of all splits."""
        return self.total_splits * self.num_slots_per_split
