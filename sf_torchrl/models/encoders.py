"""The encoder: from all observations to one vector of features, with one network a key."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from sf_torchrl.config import NetworkConfig
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.layers import MLP, USERS_OWN
from sf_torchrl.models.pictures import (
    PictureBody,
    PictureEncoder,
    channels_first,
    is_picture,
    is_scaled,
)


def own_part(setting: str, path: str, *arguments: Any) -> nn.Module:
    """A module of the user's own, by the path of its class.

    Args:
        setting: the setting that names it, for messages.
        path: ``package.module.Class``.
        *arguments: what the class is called with.

    Raises:
        ValueError: there is no such class, or its modules lack ``num_outputs``.
    """
    module_name, _, name = path.rpartition(".")
    try:
        made = getattr(importlib.import_module(module_name), name)(*arguments)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{setting}={path!r} cannot be made: {reason}") from error
    if not isinstance(made, nn.Module) or not hasattr(made, "num_outputs"):
        raise ValueError(
            f"{setting}={path!r} must be a torch module with num_outputs, its number of features; "
            f"got {type(made).__name__}"
        )
    setattr(made, USERS_OWN, True)
    return made


class VectorEncoder(nn.Module):
    """A network on an observation that is no picture, flattened if it is an MLP.

    Args:
        feature: the observation.
        config: layers.
        path: of the user's own class; None is an MLP.
    """

    def __init__(self, feature: Feature, config: NetworkConfig, path: str | None) -> None:
        super().__init__()
        self._ndims = 1 if path else len(feature.shape)
        self._scale = 1.0 / 255.0 if is_scaled(feature) else None
        self.body: nn.Module
        if path:
            self.body = own_part(_setting(feature), path, feature.shape, config)
        else:
            size = math.prod(feature.shape)
            self.body = MLP(size, config.encoder_mlp_layers, config.nonlinearity)
        self.size = cast(int, self.body.num_outputs)

    def forward(self, observation: Tensor) -> Tensor:
        """``[N, *shape]`` float32, or a picture's bytes -> ``[N, num_outputs]``."""
        if self._scale is not None:
            observation = observation * self._scale
        if self._ndims == 0:
            observation = observation.unsqueeze(-1)
        elif self._ndims > 1:
            observation = observation.flatten(-self._ndims)
        return self.body(observation)  # type: ignore[no-any-return]


def _setting(feature: Feature) -> str:
    return f"encoders[{'.'.join(feature.key)!r}]"


def make_encoder(feature: Feature, config: NetworkConfig) -> VectorEncoder | PictureEncoder:
    """The encoder of one observation, by its shape or as ``config.encoders`` says.

    Raises:
        ValueError: the encoder does not fit the observation.
    """
    picture = is_picture(feature)
    default = config.encoder_conv_architecture if picture else "mlp"
    chosen = config.encoders.get(".".join(feature.key), default)
    path = chosen if "." in chosen else None
    if chosen == "mlp" or (path and not picture):
        return VectorEncoder(feature, config, path)
    if not picture:
        raise ValueError(
            f"{_setting(feature)}={chosen!r} needs a picture, an observation of three dimensions; "
            f"its shape is {feature.shape}"
        )
    shape = feature.shape
    if not channels_first(feature, config.channel_order):
        shape = (shape[2], shape[0], shape[1])
    body = (
        own_part(_setting(feature), path, shape, config)
        if path
        else PictureBody(feature, (shape[0], shape[1], shape[2]), chosen, config)
    )
    return PictureEncoder(feature, body, config)


class Encoder(nn.Module):
    """One network per observation key, outputs concatenated.

    Args:
        features: the observation keys, in the order in which :meth:`forward` gets them.
        config: layers.

    Raises:
        ValueError: an encoder does not fit its observation, or there is no such observation.
    """

    def __init__(self, features: Sequence[Feature], config: NetworkConfig) -> None:
        super().__init__()
        known = [".".join(feature.key) for feature in features]
        unknown = sorted(set(config.encoders) - set(known))
        if unknown:
            raise ValueError(f"encoders names {unknown}; the env observes {known}")
        made = [make_encoder(feature, config) for feature in features]
        self.parts = nn.ModuleList(made)
        self.num_outputs = sum(part.size for part in made)

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        """``[N, *shape]`` for each key -> ``[N, num_outputs]``."""
        encoded = [part(x) for part, x in zip(self.parts, observations, strict=True)]
        return encoded[0] if len(encoded) == 1 else torch.cat(encoded, -1)
