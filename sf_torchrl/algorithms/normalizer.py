"""Running mean and variance of a stream, and inputs normalized by them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class RunningMeanStd(nn.Module):
    """Normalize with the mean and variance of everything that :meth:`update` was given.

    The statistics are buffers, so that they are published, saved and loaded together with
    the weights: whoever pulls a version of the policy normalizes as the learner did then.
    They are written in place and stay float64 when the module is cast, since float32 stops
    counting at 2**24.

    Source: Sample Factory's ``running_mean_std.py``, without its updates during the forward
    pass and without the NaN it makes of a single row.
    """

    mean: Tensor  # [*shape] float64
    var: Tensor  # [*shape] float64
    count: Tensor  # [] float64, rows seen plus one

    def __init__(self, shape: Sequence[int], eps: float = 1e-5, clip: float = 5.0) -> None:
        """Start as if one row of mean 0 and variance 1 had been seen.

        Args:
            shape: shape of one row; ``()`` for a scalar.
            eps: added to the variance.
            clip: normalized values are kept within +-``clip``.
        """
        super().__init__()
        self.shape = torch.Size(shape)
        self.eps = eps
        self.clip = clip
        self.register_buffer("mean", torch.zeros(self.shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(self.shape, dtype=torch.float64))
        self.register_buffer("count", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and leave the statistics alone in training mode too.

        Args:
            x: ``[..., *shape]`` of any numeric dtype.

        Returns:
            ``[..., *shape]`` float32 within +-``clip``.

        Raises:
            ValueError: if ``x`` does not end in ``shape``.
        """
        self._leading(x)
        scale = (self.var.float() + self.eps).rsqrt()
        return ((x.float() - self.mean.float()) * scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Merge rows into the statistics.

        Masked rows are left out: they change the statistics by no bit. Without any row left
        nothing happens. The variance of a batch enters with its unbiased estimate, as in
        Sample Factory, so that the running variance is slightly too large at first.

        Args:
            x: ``[..., *shape]`` of any numeric dtype.
            mask: ``[...]`` bool, True = count the row. None = count every row.

        Raises:
            ValueError: if ``x`` does not end in ``shape`` or ``mask`` is not bool ``[...]``.

        Source: Chan et al. 1979, updating formulae and a pairwise algorithm for computing
        sample variances.
        """
        leading = self._leading(x)
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != leading:
                raise ValueError(
                    f"mask must be bool of shape {list(leading)}, "
                    f"got {mask.dtype} of shape {list(mask.shape)}"
                )
            x = x[mask]
        rows = x.reshape(-1, *self.shape)
        n = rows.shape[0]
        if n == 0:
            return
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # torch.var_mean over the first dimension takes 20 times as long.
        mean = rows.mean(0)
        variance = (rows - mean).square_().sum(0) / max(1, n - 1)

        delta = mean.double() - self.mean
        total = self.count + n
        spread = self.var * self.count + variance.double() * n
        spread += delta.square() * (self.count * n / total)
        self.mean.add_(delta * (n / total))
        self.var.copy_(spread / total)
        self.count.copy_(total)

    def extra_repr(self) -> str:
        """Arguments, for ``repr``."""
        return f"{tuple(self.shape)}, eps={self.eps}, clip={self.clip}"

    def _leading(self, x: Tensor) -> torch.Size:
        leading = x.shape[: x.ndim - len(self.shape)]
        if leading + self.shape != x.shape:
            raise ValueError(f"expected [..., {list(self.shape)}], got {list(x.shape)}")
        return leading

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RunningMeanStd":
        """Follow the module to another device, but not to another dtype."""
        exact = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in exact.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float64:
                setattr(self, name, buffer.to(moved.device))
        return self
