"""What every network here is made of: linear layers, their weights, normalized inputs."""

from __future__ import annotations

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


Nonlinearity = Callable[[Tensor], Tensor]

_NONLINEARITIES: dict[str, Nonlinearity] = {
    "elu": functional.elu,
    "relu": functional.relu,
    "tanh": tanh,
}


def nonlinearity(name: str) -> Nonlinearity:
    """The function of that name: elu, relu or tanh."""
    return _NONLINEARITIES[name]


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
        self._nonlinearity = _NONLINEARITIES[nonlinearity]

    def forward(self, x: Tensor) -> Tensor:
        """``[N, num_inputs]`` -> ``[N, num_outputs]``."""
        for layer in self.layers:
            assert isinstance(layer, nn.Linear)
            x = self._nonlinearity(functional.linear(x, layer.weight, layer.bias))
        return x


USERS_OWN = "_is_users_own"
"""Attribute of modules that keep the weights they came with."""


def initialize(module: nn.Module, config: NetworkConfig) -> None:
    """Draw the weights of linear layers and convolutions as configured; biases become 0.

    Parts of the user's own are left alone.
    """
    if getattr(module, USERS_OWN, False) or config.policy_initialization == "torch_default":
        return
    for part in module.children():
        initialize(part, config)
    if not isinstance(module, nn.Linear | nn.Conv2d):
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    if config.policy_initialization == "orthogonal":
        nn.init.orthogonal_(module.weight, gain=config.policy_init_gain)
    else:
        nn.init.xavier_uniform_(module.weight, gain=config.policy_init_gain)


class InputNormalizer(nn.Module):
    """Observations as float32, normalized by running mean and deviation if wanted.

    Args:
        features: the observation keys.
        normalize: keep and apply running statistics.
        left_alone: which of the features pass through as they are.
    """

    def __init__(
        self, features: Sequence[Feature], normalize: bool, left_alone: Sequence[bool] = ()
    ) -> None:
        super().__init__()
        self._left_alone = tuple(left_alone) or (False,) * len(features)
        self.parts = nn.ModuleList(
            RunningMeanStd(feature.shape) if normalize and not alone else nn.Identity()
            for feature, alone in zip(features, self._left_alone, strict=True)
        )
        self.active = normalize and not all(self._left_alone)

    def forward(self, observations: Sequence[Tensor]) -> list[Tensor]:
        """``[N, *shape]`` for each key, float32 unless left alone."""
        converted = [
            observation if alone else observation.float()
            for observation, alone in zip(observations, self._left_alone, strict=True)
        ]
        if not self.active:
            return converted
        return [part(x) for part, x in zip(self.parts, converted, strict=True)]

    def update(self, observations: Sequence[Tensor], mask: Tensor | None) -> None:
        """Take unmasked rows into the statistics."""
        for part, observation in zip(self.parts, observations, strict=True):
            if isinstance(part, RunningMeanStd):
                part.update(observation, mask)
