"""Encoders of pictures: which dimension is what, and Sample Factory's convolutional networks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from sf_torchrl.config import NetworkConfig
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.layers import MLP, Nonlinearity, nonlinearity
from sf_torchrl.models.pieces import in_pieces, in_threads

CPU_ROWS_PER_PIECE = 64
"""Pictures whose activations stay in a core's cache: 200 us a 3x72x128 picture of training in
bfloat16, against 395 for a batch of 1024 at once (benchmarks/results)."""

_CONVNETS = {  # (output channels, kernel, stride) of each layer
    "convnet_simple": ((32, 8, 4), (64, 4, 2), (128, 3, 2)),
    "convnet_impala": ((16, 8, 4), (32, 4, 2)),
    "convnet_atari": ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
}
_RESNET_BLOCKS = ((16, 2), (32, 2), (32, 2))  # (output channels, residual blocks) of each stage


def is_picture(feature: Feature) -> bool:
    """Whether an observation is a picture: three dimensions."""
    return len(feature.shape) == 3


def is_scaled(feature: Feature) -> bool:
    """Whether it is a picture of bytes: those are divided by 255, not normalized."""
    return is_picture(feature) and feature.dtype == "uint8"


def channels_first(feature: Feature, channel_order: str) -> bool:
    """Whether a picture is ``[channels, height, width]``, not ``[height, width, channels]``.

    Raises:
        ValueError: ``channel_order`` is auto and the shape does not tell.
    """
    if channel_order != "auto":
        return channel_order == "first"
    first, _, last = feature.shape
    smaller_first = first < min(feature.shape[1:])
    smaller_last = last < min(feature.shape[:2])
    if smaller_first == smaller_last:
        raise ValueError(
            f"observation {'.'.join(feature.key)!r} of shape {feature.shape} does not tell height, "
            "width and channels apart; set network.channel_order to first or last"
        )
    return smaller_first


class ConvNet(nn.Module):
    """Convolutions, each followed by the nonlinearity, flattened.

    Args:
        shape: channels, height, width.
        layers: output channels, kernel and stride of each.
        activation: after each layer.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        layers: Sequence[tuple[int, int, int]],
        activation: Nonlinearity,
    ) -> None:
        super().__init__()
        self._activation = activation
        self.layers = nn.ModuleList()
        channels = shape[0]
        for out_channels, kernel, stride in layers:
            self.layers.append(nn.Conv2d(channels, out_channels, kernel, stride))
            channels = out_channels

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels, height, width]`` -> ``[N, num_outputs]``."""
        for layer in self.layers:
            x = self._activation(layer(x))
        return x.flatten(1)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, activation: Nonlinearity) -> None:
        super().__init__()
        self._activation = activation
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(self._activation(y))
        return x + y


class ResNet(nn.Module):
    """IMPALA's deep network: stages of a convolution, pooling and residual blocks.

    Args:
        shape: channels, height, width.
        activation: before each convolution of a block, and at the end.

    Source: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, figure 3.
    """

    def __init__(self, shape: tuple[int, int, int], activation: Nonlinearity) -> None:
        super().__init__()
        self._activation = activation
        stages: list[nn.Module] = []
        channels = shape[0]
        for out_channels, blocks in _RESNET_BLOCKS:
            stages.append(nn.Conv2d(channels, out_channels, 3, padding=1))
            stages.append(nn.MaxPool2d(3, stride=2, padding=1))
            stages += [_ResidualBlock(out_channels, activation) for _ in range(blocks)]
            channels = out_channels
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels, height, width]`` -> ``[N, num_outputs]``."""
        return self._activation(self.stages(x)).flatten(1)


class PictureBody(nn.Module):
    """One of Sample Factory's networks for pictures, with its linear layers.

    Args:
        feature: the observation, for messages.
        shape: its channels, height, width.
        architecture: one of ``CONV_ARCHITECTURES``.
        config: linear layers and nonlinearity.

    Raises:
        ValueError: the picture is too small for the convolutions.
    """

    def __init__(
        self,
        feature: Feature,
        shape: tuple[int, int, int],
        architecture: str,
        config: NetworkConfig,
    ) -> None:
        super().__init__()
        activation = nonlinearity(config.nonlinearity)
        self.convolutions: nn.Module = (
            ResNet(shape, activation)
            if architecture == "resnet_impala"
            else ConvNet(shape, _CONVNETS[architecture], activation)
        )
        try:
            with torch.no_grad():
                num_features = self.convolutions(torch.zeros(1, *shape)).shape[1]
        except RuntimeError as error:
            raise ValueError(
                f"observation {'.'.join(feature.key)!r} of height {shape[1]} and width {shape[2]} "
                f"is too small for {architecture}; make it larger, or choose another encoder"
            ) from error
        self.mlp = MLP(num_features, config.encoder_conv_mlp_layers, config.nonlinearity)
        self.num_outputs = self.mlp.num_outputs

    def forward(self, x: Tensor) -> Tensor:
        """``[N, channels, height, width]`` -> ``[N, num_outputs]``."""
        return self.mlp(self.convolutions(x))  # type: ignore[no-any-return]


class PictureEncoder(nn.Module):
    """A network for pictures, fed in pieces that fit the cache, as the hardware likes them.

    Each piece is made floating-point, scaled and laid out channels-last in one go; bytes travel up
    to here. One graph over all pieces: the gradient is that of the whole batch at once.

    Args:
        feature: the observation.
        body: takes ``[n, channels, height, width]``, has ``num_outputs``.
        config: channel order and size of a piece.
    """

    def __init__(self, feature: Feature, body: nn.Module, config: NetworkConfig) -> None:
        super().__init__()
        self.body = body
        self.size = cast(int, body.num_outputs)
        self._first = channels_first(feature, config.channel_order)
        self._scale = 1.0 / 255.0 if is_scaled(feature) else None
        self._rows_per_piece = config.rows_per_piece
        self.num_threads = 1
        """Threads that share the pieces where there is a gradient to compute."""

    def forward(self, pictures: Tensor) -> Tensor:
        """``[N, *shape]`` as the env observes them -> ``[N, num_outputs]``."""
        rows = self._rows(pictures)
        parameters = [p for p in self.body.parameters() if p.requires_grad]
        learning = torch.is_grad_enabled() and parameters
        if self.num_threads > 1 and learning and len(pictures) > rows:
            # About two shares a thread: few gradients to add, and little to wait for at the end.
            share = rows * max(1, len(pictures) // (2 * self.num_threads * rows))
            encode = partial(self._encode, rows=rows)
            return in_threads(encode, pictures, share, parameters, self.num_threads)
        return self._encode(pictures, rows)

    def _encode(self, pictures: Tensor, rows: int) -> Tensor:
        """Convolutions in pieces; linear layers of all at once, whose gradient is large to add."""
        body = self.body
        ours = isinstance(body, PictureBody)  # which part of another one may wait is unknown
        part = cast(nn.Module, body.convolutions if ours else body)
        x = in_pieces(lambda piece: part(self._prepare(piece)), pictures, rows)
        return cast(nn.Module, body.mlp)(x) if ours else x

    def _rows(self, pictures: Tensor) -> int:
        chosen = self._rows_per_piece
        if not chosen:
            chosen = CPU_ROWS_PER_PIECE if pictures.device.type == "cpu" else len(pictures)
        return max(1, chosen)

    def _prepare(self, piece: Tensor) -> Tensor:
        """Floating-point ``[n, channels, height, width]``, in channels-last memory.

        3 us a picture of 3x72x128 that is channels-last already, 13 for another.
        """
        device = piece.device.type
        dtype = torch.float32
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        if self._first:  # two copies: torch's converting transposition takes twice as long
            x = piece.to(dtype).contiguous(memory_format=torch.channels_last)
        else:
            x = piece.to(dtype).permute(0, 3, 1, 2)
        if self._scale is None:
            return x
        return x.mul_(self._scale)  # a copy of its own: bytes have been converted
