"""Encoders: from one observation to a vector of features."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sf_torchrl.algorithms.normalizer import RunningMeanStd
from sf_torchrl.config import NetworkConfig
from sf_torchrl.memory.slab import Feature


def _tanh_by_sigmoid(x: Tensor) -> Tensor:
    return torch.mul(x, 2.0).sigmoid_().mul_(2.0).sub_(1.0)


class _Tanh(torch.autograd.Function):
    """2 sigmoid(2x) - 1, with the gradient of the tangent itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = _tanh_by_sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(grad, y)  # type: ignore[no-any-return]


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, to 2e-7.

    On CPUs by the sigmoid: torch 2.13 computes its own tanh five times slower (278 us against 57
    for 2048 x 64 numbers), which was a third of the learner's time on CartPole.
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return torch.tanh(x)
    if x.requires_grad:
        return _Tanh.apply(x)  # type: ignore[no-any-return, no-untyped-call]
    return _tanh_by_sigmoid(x)


_NONLINEARITY: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": functional.elu,
    "relu": functional.relu,
    "tanh": tanh,
}


class MLP(nn.Module):
    """Linear layers, each followed by the nonlinearity; none is the identity.

    The layers are applied here and not in a chain of modules: at the sizes of an inference batch
    calling two modules a layer costs as much as computing it.

    Args:
        num_inputs: size of the input.
        layers: units of each layer.
        nonlinearity: elu, relu or tanh.
    """

    def __init__(self, num_inputs: int, layers: Sequence[int], nonlinearity: str) -> None:
        super().__init__()
        self.num_outputs = layers[-1] if layers else num_inputs
        self.layers = nn.ModuleList()
        for units in layers:
            self.layers.append(nn.Linear(num_inputs, units))
            num_inputs = units
        self._nonlinearity = _NONLINEARITY[nonlinearity]

    def forward(self, x: Tensor) -> Tensor:
        """``[N, num_inputs]`` -> ``[N, num_outputs]``."""
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = self._nonlinearity(functional.linear(x, layer.weight, layer.bias))
        return x


def initialize(module: nn.Module, config: NetworkConfig) -> None:
    """Draw the weights of linear layers as configured; biases become 0, as in Sample Factory."""
    if not isinstance(module, nn.Linear) or config.policy_initialization == "torch_default":
        return
    nn.init.zeros_(module.bias)
    if config.policy_initialization == "orthogonal":
        nn.init.orthogonal_(module.weight, gain=config.policy_init_gain)
    else:
        nn.init.xavier_uniform_(module.weight, gain=config.policy_init_gain)


class Encoder(nn.Module):
    """One MLP per observation key, outputs concatenated.

    Args:
        features: the observation keys, in the order in which :meth:`forward` gets them.
        config: layers and nonlinearity.

    Raises:
        ValueError: an observation is a picture (three dimensions): it needs a network of your own.
    """

    def __init__(self, features: Sequence[Feature], config: NetworkConfig) -> None:
        super().__init__()
        for feature in features:
            if len(feature.shape) >= 3:
                raise ValueError(
                    f"observation {'.'.join(feature.key)!r} has shape {feature.shape}: pictures "
                    "need a convolutional network; pass a torso of your own"
                )
        self._ndims = [len(feature.shape) for feature in features]
        sizes = [math.prod(feature.shape) for feature in features]
        self.parts = nn.ModuleList(
            MLP(size, config.encoder_mlp_layers, config.nonlinearity) for size in sizes
        )
        layers = config.encoder_mlp_layers
        self.num_outputs = len(sizes) * layers[-1] if layers else sum(sizes)

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        """``[N, *shape]`` float32 for each key -> ``[N, num_outputs]``."""
        encoded = [
            part(observation.flatten(-ndims) if ndims > 1 else observation)
            for part, observation, ndims in zip(self.parts, observations, self._ndims, strict=True)
        ]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)


class InputNormalizer(nn.Module):
    """Observations as float32, normalized by running mean and deviation if wanted.

    Args:
        features: the observation keys.
        normalize: keep and apply running statistics.
    """

    def __init__(self, features: Sequence[Feature], normalize: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            RunningMeanStd(feature.shape) if normalize else nn.Identity() for feature in features
        )
        self.active = normalize

    def forward(self, observations: Sequence[Tensor]) -> list[Tensor]:
        """``[N, *shape]`` for each key, float32."""
        if not self.active:
            return [observation.float() for observation in observations]
        return [part(x) for part, x in zip(self.parts, observations, strict=True)]

    def update(self, observations: Sequence[Tensor], mask: Tensor | None) -> None:
        """Take unmasked rows into the statistics."""
        for part, observation in zip(self.parts, observations, strict=True):
            if isinstance(part, RunningMeanStd):
                part.update(observation, mask)
