"""Action distributions as plain functions of the policy's output.

An object here describes an action space and holds no tensor: it can be made once, sent to
another process and called for every batch. ``params`` is what the policy's last layer wrote,
``[..., num_params]`` with any leading dimensions. A call costs a fraction of building a
``torch.distributions`` object, which matters where one forward pass takes 100 microseconds.

Computed in float32 whatever the precision of ``params`` (float64 stays float64): a ratio of
probabilities is the exponential of a small difference of these numbers.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MIN_STD, MAX_STD = 1e-4, 1e4  # Sample Factory's
_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


@dataclass(frozen=True)
class Categorical:
    """One of ``n`` actions; ``params`` are logits, and need not be normalized.

    An action whose logit is -inf is forbidden: it is never drawn (as long as another is
    allowed), has log-probability -inf, and adds neither a number nor NaN to entropy,
    divergence or gradients.
    """

    n: int
    """Number of actions."""

    action_dtype: ClassVar[torch.dtype] = torch.int64

    def __post_init__(self) -> None:
        """Refuse an empty space."""
        if self.n < 1:
            raise ValueError(f"Categorical needs at least one action, got n={self.n}")

    @property
    def num_params(self) -> int:
        """Size of the last dimension of ``params``."""
        return self.n

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return ()

    @torch.no_grad()
    def sample(self, params: Tensor) -> Tensor:
        """``[...]`` int64, drawn with torch's global generator of the device.

        The argmax of logits plus Gumbel noise, which is a race of exponential clocks on a
        log scale. Uniform numbers of 24 bits bound the noise: an action of probability 1e-6
        comes 3% too rarely, one of 1e-8 hardly ever.
        """
        logits = self._logits(params)
        # From the smallest normal number up: log(0) could leave no action to choose.
        noise = torch.empty_like(logits).uniform_(torch.finfo(logits.dtype).tiny, 1.0)
        return (logits - noise.log_().neg_().log_()).argmax(-1)

    def mode(self, params: Tensor) -> Tensor:
        """``[...]`` int64, the most probable action; the first of several."""
        return self._logits(params).argmax(-1)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """``[...]`` log-probability of ``action`` ``[...]`` int64."""
        return self._pick(self._log_probs(params), action)

    def entropy(self, params: Tensor) -> Tensor:
        """``[...]`` entropy in nats, in [0, log n]."""
        return _entropy(self._log_probs(params))

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`log_prob` and :meth:`entropy` for the price of one log-softmax."""
        log_probs = self._log_probs(params)
        return self._pick(log_probs, action), _entropy(log_probs)

    def kl(self, params: Tensor, old_params: Tensor) -> Tensor:
        """``[...]`` KL(params || old_params) in nats."""
        _check_same(params, old_params)
        log_probs, old_log_probs = self._log_probs(params), self._log_probs(old_params)
        return (log_probs.exp() * (_finite(log_probs) - _finite(old_log_probs))).sum(-1)

    def _logits(self, params: Tensor) -> Tensor:
        return _full_precision(params, self.num_params)

    def _log_probs(self, params: Tensor) -> Tensor:
        return self._logits(params).log_softmax(-1)

    def _pick(self, log_probs: Tensor, action: Tensor) -> Tensor:
        _check_action(action, log_probs.shape[:-1])
        return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True)
class DiagonalGaussian:
    """``num_dims`` independent normal numbers; ``params`` are means, then log deviations.

    Deviations are clamped to [1e-4, 1e4], as in Sample Factory. Actions are not clipped to
    the space's bounds: the log-probability is of the action that was drawn.
    """

    num_dims: int
    """Numbers in one action."""

    action_dtype: ClassVar[torch.dtype] = torch.float32

    def __post_init__(self) -> None:
        """Refuse an empty space."""
        if self.num_dims < 1:
            raise ValueError(f"DiagonalGaussian needs num_dims >= 1, got {self.num_dims}")

    @property
    def num_params(self) -> int:
        """Size of the last dimension of ``params``."""
        return 2 * self.num_dims

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Shape of one action."""
        return (self.num_dims,)

    @torch.no_grad()
    def sample(self, params: Tensor) -> Tensor:
        """``[..., num_dims]`` float32, drawn with torch's global generator of the device."""
        mean, log_std = self._split(params)
        action = torch.addcmul(mean, log_std.exp(), torch.randn_like(mean))
        return action.to(self.action_dtype)

    def mode(self, params: Tensor) -> Tensor:
        """``[..., num_dims]`` float32, the mean."""
        return self._split(params)[0].to(self.action_dtype)

    def log_prob(self, params: Tensor, action: Tensor) -> Tensor:
        """``[...]`` log-density of ``action`` ``[..., num_dims]``."""
        mean, log_std = self._split(params)
        return self._log_density(mean, log_std, action)

    def entropy(self, params: Tensor) -> Tensor:
        """``[...]`` differential entropy in nats; may be negative."""
        _, log_std = self._split(params)
        return self._entropy(log_std)

    def log_prob_and_entropy(self, params: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`log_prob` and :meth:`entropy`, with ``params`` taken apart once."""
        mean, log_std = self._split(params)
        return self._log_density(mean, log_std, action), self._entropy(log_std)

    def kl(self, params: Tensor, old_params: Tensor) -> Tensor:
        """``[...]`` KL(params || old_params) in nats."""
        _check_same(params, old_params)
        (mean, log_std), (old_mean, old_log_std) = self._split(params), self._split(old_params)
        log_scale = log_std - old_log_std
        shift = (mean - old_mean) * (-old_log_std).exp()
        return (0.5 * ((2.0 * log_scale).exp() + shift.square() - 1.0) - log_scale).sum(-1)

    def _split(self, params: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = _full_precision(params, self.num_params).chunk(2, -1)
        return mean, log_std.clamp(math.log(MIN_STD), math.log(MAX_STD))

    def _log_density(self, mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
        _check_action(action, mean.shape)
        distance = (action - mean) * (-log_std).exp()
        terms = -0.5 * distance.square() - log_std
        return terms.sum(-1) - self.num_dims * _HALF_LOG_TWO_PI

    def _entropy(self, log_std: Tensor) -> Tensor:
        return log_std.sum(-1) + self.num_dims * (0.5 + _HALF_LOG_TWO_PI)


ActionDistribution = Categorical | DiagonalGaussian


def _full_precision(params: Tensor, num_params: int) -> Tensor:
    if params.shape[-1:] != (num_params,):
        raise ValueError(f"params must be [..., {num_params}], got {list(params.shape)}")
    return params if params.dtype == torch.float64 else params.float()


def _check_action(action: Tensor, shape: torch.Size) -> None:
    # [B] against [B, 1] would broadcast to [B, B] and train on it without a word.
    if action.shape != shape:
        raise ValueError(f"action must be {list(shape)}, got {list(action.shape)}")


def _check_same(params: Tensor, old_params: Tensor) -> None:
    if params.shape != old_params.shape:
        raise ValueError(
            f"kl needs one shape, got {list(params.shape)} and {list(old_params.shape)}"
        )


def _finite(log_probs: Tensor) -> Tensor:
    """-inf made finite, so that a probability of 0 times it is 0 and not NaN."""
    return log_probs.clamp(min=torch.finfo(log_probs.dtype).min)


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * _finite(log_probs)).sum(-1)
