"""Settings: names, defaults, units and checks. Names follow Sample Factory where it has one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field


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
    policy_device: str = "cpu"
    """Device of the inference worker: cpu, or cuda where there is one."""
    env_start_timeout_s: float = 120.0
    """Seconds within which every env must have been made and reset."""
    inference_threads: int = 0
    """Threads of the inference worker; 0 takes a quarter of the cores that env workers leave."""

    def __post_init__(self) -> None:
        for name in (
            "num_envs_per_worker",
            "num_splits",
            "rollout_length",
            "frames_per_batch",
            "max_batches_in_flight",
        ):
            value = getattr(self, name)
            _check(isinstance(value, int), f"{name}={value!r} must be an integer")
            _check(value >= 1, f"{name}={value} must be at least 1")
        for name in ("num_workers", "inference_threads"):
            value = getattr(self, name)
            _check(value >= 0, f"{name}={value} must not be negative")
        _check(
            self.num_workers > 0 or self.policy_device == "cpu",
            f"policy_device={self.policy_device!r} needs worker processes, got num_workers=0",
        )
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
            f"rollout_length={self.rollout_length}: a batch is made of whole rollouts; "
            f"rollout_length={self._divisor()} would do",
        )
        if not self.async_mode:
            _check(
                self.frames_per_batch % self.steps_per_sweep == 0,
                f"with async_mode=False every env gives the same number of rollouts to a batch: "
                f"frames_per_batch={self.frames_per_batch} must be a multiple of "
                f"num_envs*rollout_length={self.steps_per_sweep}",
            )

    def _divisor(self) -> int:
        """The longest rollout up to the one asked for that batches can be made of."""
        lengths = range(self.rollout_length, 0, -1)
        return next(length for length in lengths if self.frames_per_batch % length == 0)

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


def inference_and_learner_threads(num_workers: int) -> tuple[int, int]:
    """CPU threads of the inference worker and of the learner, from the cores there are.

    Env workers come first, as one core each; of what they leave the inference worker gets a
    quarter, the learner the rest. Each gets one at the least.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    free = max(1, (cores or 1) - num_workers)
    inference = max(1, free // 4)
    return inference, max(1, free - inference)


NONLINEARITIES = ("elu", "relu", "tanh")
INITIALIZATIONS = ("orthogonal", "xavier_uniform", "torch_default")
CONV_ARCHITECTURES = ("convnet_simple", "convnet_impala", "convnet_atari", "resnet_impala")
CORES = ("none", "gru", "lstm")
CHANNEL_ORDERS = ("auto", "first", "last")
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Layers of the actor-critic. Defaults are Sample Factory's, except where a field says so."""

    encoder_mlp_layers: tuple[int, ...] = (512, 512)
    """Units of each layer of the encoder of an observation that is no picture."""
    encoder_conv_architecture: str = "convnet_simple"
    """Encoder of a picture (an observation of three dimensions): convnet_simple, convnet_impala,
    convnet_atari or resnet_impala."""
    encoder_conv_mlp_layers: tuple[int, ...] = (512,)
    """Units of each layer behind the convolutions."""
    encoders: Mapping[str, str] = field(default_factory=dict)
    """Encoders of single observation keys, where they differ: mlp, one of the architectures for
    pictures, or package.module.Class: a module made with (shape, config), shape being (channels,
    height, width) of a picture, that has num_outputs and takes float32 [N, *shape], pictures
    scaled to [0, 1]."""
    channel_order: str = "auto"
    """Where a picture has its channels: first or last. auto takes the dimension that is smaller
    than both others."""
    core: str = "none"
    """Memory between encoder and decoder: none, gru or lstm. Sample Factory's use_rnn and rnn_type;
    its default is a GRU."""
    rnn_size: int = 512
    """Units of each layer of the core."""
    rnn_num_layers: int = 1
    """Layers of the core."""
    decoder_mlp_layers: tuple[int, ...] = ()
    """Units of each layer between core and heads."""
    decoder: str = "mlp"
    """mlp, or package.module.Class: a module made with (num_inputs, config) that has num_outputs
    and takes [N, num_inputs]."""
    nonlinearity: str = "elu"
    """Activation after each layer: elu, relu or tanh."""
    actor_critic_share_weights: bool = True
    """One encoder, core and decoder for both heads; False gives the critic its own."""
    policy_initialization: str = "orthogonal"
    """How weights are drawn: orthogonal, xavier_uniform or torch_default; cores always as torch
    does."""
    policy_init_gain: float = 1.0
    """Factor on orthogonal and Xavier initialization."""
    initial_stddev: float = 1.0
    """Continuous actions: standard deviation at the start, in action units."""
    adaptive_stddev: bool = True
    """Continuous actions: the deviation depends on the observation; False learns one for all."""
    normalize_input: bool = True
    """Normalize observations by their running mean and deviation, kept with the weights. uint8
    pictures are only scaled to [0, 1]; Sample Factory normalizes each of their pixels."""
    precision: str = "auto"
    """Of encoder, core and decoder, in learner and inference worker alike: float32, bfloat16
    (weights, heads, losses and targets stay float32), or auto: bfloat16 for pictures where the
    processor computes in it, else float32."""
    rows_per_piece: int = 0
    """Pictures that go through the encoder at once, so that they stay in the cache; 0: 64 on CPUs,
    all on GPUs. Changes no result beyond rounding."""

    def __post_init__(self) -> None:
        for name in ("encoder_mlp_layers", "encoder_conv_mlp_layers", "decoder_mlp_layers"):
            layers = getattr(self, name)
            _check(
                all(isinstance(units, int) and units >= 1 for units in layers),
                f"{name}={list(layers)} must be positive integers",
            )
        for name, choices in (
            ("nonlinearity", NONLINEARITIES),
            ("policy_initialization", INITIALIZATIONS),
            ("encoder_conv_architecture", CONV_ARCHITECTURES),
            ("core", CORES),
            ("channel_order", CHANNEL_ORDERS),
            ("precision", PRECISIONS),
        ):
            _check_choice(name, getattr(self, name), choices)
        _check_choice_or_class("decoder", self.decoder, ("mlp",))
        for key, encoder in self.encoders.items():
            _check_choice_or_class(f"encoders[{key!r}]", encoder, ("mlp", *CONV_ARCHITECTURES))
        for name in ("rnn_size", "rnn_num_layers"):
            value = getattr(self, name)
            _check(value >= 1, f"{name}={value} must be at least 1")
        _check(self.rows_per_piece >= 0, f"rows_per_piece={self.rows_per_piece} must not be < 0")
        _check(self.policy_init_gain > 0, f"policy_init_gain={self.policy_init_gain} must be > 0")
        _check(self.initial_stddev > 0, f"initial_stddev={self.initial_stddev} must be positive")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    _check(value in choices, f"{name}={value!r} must be one of {', '.join(choices)}")


def _check_choice_or_class(name: str, value: str, choices: tuple[str, ...]) -> None:
    _check(
        value in choices or "." in value,
        f"{name}={value!r} must be one of {', '.join(choices)}, or package.module.Class",
    )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The APPO loss. Names and defaults are Sample Factory's, except where a field says so."""

    gamma: float = 0.99
    """Discount per env step."""
    with_vtrace: bool = True
    """Correct for lag with V-trace; False uses GAE on the values of the acting policy. Sample
    Factory's default is False; its paper used V-trace."""
    vtrace_rho: float = 1.0
    """Cap on the importance ratio in V-trace's temporal differences (rho-bar)."""
    vtrace_c: float = 1.0
    """Cap on the importance ratio in V-trace's trace (c-bar)."""
    vtrace_bootstrap: str = "next_value"
    """next_value: the published V-trace. sample_factory: its defective start of the recursion,
    which gives the last step of a rollout no advantage; for comparison only."""
    gae_lambda: float = 0.95
    """Decay of GAE; unused with V-trace."""
    ppo_clip_ratio: float = 0.1
    """e: the importance ratio is clipped to [1 / (1 + e), 1 + e]."""
    ppo_clip_value: float = 1.0
    """How far the value may move from the acting policy's, in (scaled) reward units."""
    value_loss_coeff: float = 0.5
    """Weight of the value loss."""
    exploration_loss_coeff: float = 0.003
    """Weight of the entropy bonus."""
    normalize_advantage: bool = True
    """Advantages with mean 0 and deviation 1 over the unmasked steps of a minibatch."""
    reward_scale: float = 1.0
    """Factor on rewards before the loss; reported returns stay the env's own."""
    reward_clip: float = 1000.0
    """Scaled rewards are clipped to plus and minus this."""

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            value = getattr(self, name)
            _check(0 <= value <= 1, f"{name}={value} must be in [0, 1]")
        for name in ("vtrace_rho", "vtrace_c", "ppo_clip_ratio", "ppo_clip_value", "reward_clip"):
            value = getattr(self, name)
            _check(value > 0, f"{name}={value} must be positive")
        for name in ("value_loss_coeff", "exploration_loss_coeff"):
            value = getattr(self, name)
            _check(value >= 0, f"{name}={value} must not be negative")
        _check_choice("vtrace_bootstrap", self.vtrace_bootstrap, ("next_value", "sample_factory"))


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the learner steps. Names and defaults are Sample Factory's where the meaning is equal."""

    learning_rate: float = 1e-4
    """Adam's step size."""
    adam_eps: float = 1e-6
    """Adam's denominator offset."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    max_grad_norm: float = 4.0
    """Gradient norm above which gradients are scaled down; 0 never does."""
    ppo_epochs: int = 1
    """Passes over each batch. Sample Factory's num_epochs."""
    num_minibatches: int = 1
    """Optimizer steps in one pass; divides the rollouts of a batch. Sample Factory's
    num_batches_per_epoch."""
    shuffle_minibatches: bool = False
    """Draw the rollouts of each minibatch anew in every pass."""
    max_policy_lag: int = 1000
    """Oldest experience trained on, in policy versions (optimizer steps), inclusive."""
    learner_threads: int = 0
    """CPU threads of the learner; 0 takes those that env workers and inference worker leave."""

    def __post_init__(self) -> None:
        _check(self.learning_rate >= 0, f"learning_rate={self.learning_rate} must not be negative")
        _check(self.adam_eps > 0, f"adam_eps={self.adam_eps} must be positive")
        for name in ("adam_beta1", "adam_beta2"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"{name}={value} must be in [0, 1)")
        for name in ("ppo_epochs", "num_minibatches"):
            value = getattr(self, name)
            _check(value >= 1, f"{name}={value} must be at least 1")
        for name in ("max_grad_norm", "max_policy_lag", "learner_threads"):
            value = getattr(self, name)
            _check(value >= 0, f"{name}={value} must not be negative")
