"""Sample Factory's execution engine as native parts of PyTorch Lightning and TorchRL.

Names are imported when first used: importing the package imports neither torch nor anything else
that takes time, and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sf_torchrl.algorithms.loss import APPOLoss
    from sf_torchrl.algorithms.vtrace import vtrace
    from sf_torchrl.collector import SharedMemoryCollector
    from sf_torchrl.data import RolloutDataModule
    from sf_torchrl.memory.weights import WeightStore
    from sf_torchrl.models.actor_critic import ActorCritic
    from sf_torchrl.module import APPOModule

__version__ = "0.1.0"

_HOME = {
    "APPOLoss": "sf_torchrl.algorithms.loss",
    "APPOModule": "sf_torchrl.module",
    "ActorCritic": "sf_torchrl.models.actor_critic",
    "RolloutDataModule": "sf_torchrl.data",
    "SharedMemoryCollector": "sf_torchrl.collector",
    "WeightStore": "sf_torchrl.memory.weights",
    "vtrace": "sf_torchrl.algorithms.vtrace",
}

__all__ = [
    "APPOLoss",
    "APPOModule",
    "ActorCritic",
    "RolloutDataModule",
    "SharedMemoryCollector",
    "WeightStore",
    "vtrace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sf_torchrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
