"""Rows on their way between the slab and the device that the policy runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Where = Sequence[tuple[int, int]]
"""Slot and step of each request."""


class HostRows:
    """The policy runs on the CPU: rows are gathered once, answers are read where they lie."""

    def gather(self, leaves: Sequence[Array], where: Where) -> list[Tensor]:
        """``[len(where) * k, ...]`` of each leaf ``[slot, k, T, ...]``: 3 us and the copy."""
        return [
            torch.from_numpy(np.concatenate([leaf[slot, :, t] for slot, t in where]))
            for leaf in leaves
        ]

    def fetch(self, answers: Sequence[Tensor]) -> list[Array]:
        """The answers as arrays."""
        return [answer.numpy() for answer in answers]


class DeviceRows:
    """The policy runs on an accelerator: page-locked staging, and one wait a forward pass.

    Rows are gathered into page-locked memory and copied from there without waiting; the answers
    come back the same way, and are waited for once, all together.

    Args:
        device: where the policy runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page_locked = device.type == "cuda"
        self._staged: dict[tuple[str, int], Tensor] = {}

    def gather(self, leaves: Sequence[Array], where: Where) -> list[Tensor]:
        """``[len(where) * k, ...]`` of each leaf ``[slot, k, T, ...]``, on the device."""
        found = []
        for index, leaf in enumerate(leaves):
            rows = [leaf[slot, :, t] for slot, t in where]
            count = sum(len(part) for part in rows)
            staged = self._buffer(("in", index), count, torch.from_numpy(rows[0]))
            np.concatenate(rows, out=staged.numpy())
            found.append(staged.to(self._device, non_blocking=self._page_locked))
        return found

    def fetch(self, answers: Sequence[Tensor]) -> list[Array]:
        """The answers as arrays, valid until the next call."""
        staged = [
            self._buffer(("out", index), len(answer), answer)
            for index, answer in enumerate(answers)
        ]
        for target, answer in zip(staged, answers, strict=True):
            target.copy_(answer, non_blocking=self._page_locked)
        if self._page_locked:
            torch.cuda.current_stream(self._device).synchronize()
        return [target.numpy() for target in staged]

    def _buffer(self, key: tuple[str, int], count: int, like: Tensor) -> Tensor:
        """``count`` rows of memory that stays; its last use is over, since ``fetch`` waits."""
        staged = self._staged.get(key)
        if staged is None or len(staged) < count:
            staged = torch.empty(
                (count, *like.shape[1:]), dtype=like.dtype, pin_memory=self._page_locked
            )
            self._staged[key] = staged
        return staged[:count]


def rows_for(device: torch.device) -> HostRows | DeviceRows:
    """How rows travel to a device and back."""
    return HostRows() if device.type == "cpu" else DeviceRows(device)


def check_device(name: str, device: torch.device | str | int | None) -> torch.device:
    """The device, if there is one.

    Args:
        name: of the setting, for messages.
        device: None is the CPU.

    Raises:
        ValueError: torch knows no such device, or this machine has none.
    """
    try:
        found = torch.device("cpu" if device is None else device)
        torch.empty(0, device=found)
        if found.type not in ("cpu", "cuda"):
            raise RuntimeError("only the CPU and CUDA devices are supported")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{name}={str(device)!r} cannot be used here: {reason}") from None
    return found
