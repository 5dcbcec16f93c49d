"""The weight store: the policy's parameters and buffers, published by version.

Two copies and a sequence counter in host shared memory (a seqlock): publishing writes the copy
nobody is told to read, then moves the counter; pulling copies and checks that the counter has not
moved far enough for the copy to have been overwritten. No lock, so a process that is killed at any
instant leaves nothing locked; a reader sees one whole version or the one before it, never a mix.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

import numpy as np
import torch
from torch import Tensor, nn

from sf_torchrl.memory.arena import ALIGNMENT, Arena, aligned

Weights = Union[nn.Module, "TensorDictBase", Mapping[str, Tensor]]

if TYPE_CHECKING:
    from tensordict import TensorDictBase

# int64 words of the header: publications begun, publications completed, the version in each copy.
_BEGUN, _DONE, _VERSION = 0, 1, 2
_HEADER_BYTES = ALIGNMENT
_MAX_PULL_ATTEMPTS = 1000


@dataclass(frozen=True)
class WeightSpec:
    """Name, dtype and shape of one parameter or buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of ``module`` by name, shared ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


_fence_lock = threading.Lock()


def _fence() -> None:
    """Order memory accesses before and after it, on processors that reorder stores (ARM) too.

    Two passes through a lock: an access can move into one, not past the release of the first and
    the acquisition of the second.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass


class WeightStore:
    """Weights in shared memory: one process publishes, any number pull.

    Args:
        module: its parameters and buffers give names, dtypes and shapes, and are published as
            version 0.
    """

    def __init__(self, module: nn.Module) -> None:
        specs = tuple(
            WeightSpec(name, t.dtype, tuple(t.shape)) for name, t in named_weights(module).items()
        )
        self._open(specs, fd=None)
        self.publish(module, version=0)

    @classmethod
    def attach(cls, specs: tuple[WeightSpec, ...], fd: int) -> WeightStore:
        """The store of another process, by the descriptor of its arena."""
        store = cls.__new__(cls)
        store._open(specs, fd)
        return store

    def _open(self, specs: tuple[WeightSpec, ...], fd: int | None) -> None:
        self.specs = specs
        copy_bytes = sum(aligned(spec.nbytes) for spec in specs)
        self._arena = Arena(_HEADER_BYTES + 2 * copy_bytes, fd)
        self._header = np.frombuffer(self._arena.buffer, np.int64, _HEADER_BYTES // 8)
        self._copies = [self._views(_HEADER_BYTES + index * copy_bytes) for index in range(2)]
        self._pulled_into: tuple[nn.Module | None, list[Tensor]] = (None, [])

    def _views(self, offset: int) -> list[Tensor]:
        views = []
        for spec in self.specs:
            count = spec.nbytes // spec.dtype.itemsize
            if count:
                flat = torch.frombuffer(
                    self._arena.buffer, dtype=spec.dtype, count=count, offset=offset
                )
            else:
                flat = torch.empty(0, dtype=spec.dtype)
            views.append(flat.view(spec.shape))
            offset += aligned(spec.nbytes)
        return views

    @property
    def fd(self) -> int:
        """File descriptor of the shared mapping, for :meth:`attach` in another process."""
        return self._arena.fd

    @property
    def sequence(self) -> int:
        """Number of publications: it moves even where one repeats a version."""
        return int(self._header[_DONE])

    @property
    def version(self) -> int:
        """Version of the newest weights, in optimizer steps when a learner publishes."""
        return int(self._header[_VERSION + int(self._header[_DONE]) % 2])

    @torch.no_grad()
    def publish(self, weights: Weights, version: int | None = None) -> int:
        """Make ``weights`` the newest version; cost: one copy of them.

        Args:
            weights: a module, a ``TensorDict`` of parameters or a state dict with every name of
                the store; other names are ignored.
            version: its ``policy_version``; None counts one up.

        Returns:
            The version published.

        Raises:
            ValueError: a name of the store is missing or has another shape.
        """
        sources = self._sources(weights)
        version = self.version + 1 if version is None else version
        sequence = int(self._header[_DONE]) + 1
        self._header[_BEGUN] = sequence
        _fence()  # readers of the copy that is about to change must see that it is
        if sources:
            torch._foreach_copy_(self._copies[sequence % 2], sources)
        self._header[_VERSION + sequence % 2] = version
        _fence()  # the counter moves only after the weights are in place
        self._header[_DONE] = sequence
        return version

    def newest(self) -> dict[str, Tensor]:
        """Copies of the newest weights, by name; for the publisher's own process."""
        views = self._copies[self.sequence % 2]
        return {spec.name: v.clone() for spec, v in zip(self.specs, views, strict=True)}

    @torch.no_grad()
    def pull(self, module: nn.Module) -> int:
        """Copy the newest whole version into ``module``'s parameters and buffers.

        Returns:
            The version now in ``module``; never newer than its weights.

        Raises:
            RuntimeError: the publisher overwrote every copy that was read, a thousand times over.
        """
        targets = self._targets(module)
        for _ in range(_MAX_PULL_ATTEMPTS):
            sequence = int(self._header[_DONE])
            _fence()
            version = int(self._header[_VERSION + sequence % 2])
            if targets:
                torch._foreach_copy_(targets, self._copies[sequence % 2])
            _fence()
            if int(self._header[_BEGUN]) <= sequence + 1:
                return version
        raise RuntimeError(f"weights changed during each of {_MAX_PULL_ATTEMPTS} pulls")

    def _sources(self, weights: Weights) -> list[Tensor]:
        if isinstance(weights, nn.Module):
            named: Mapping[str, Tensor] = named_weights(weights)
        elif hasattr(weights, "flatten_keys"):  # a TensorDict, without importing tensordict
            named = dict(weights.flatten_keys(".").items())
        else:
            named = weights
        missing = [spec.name for spec in self.specs if spec.name not in named]
        if missing:
            raise ValueError(f"weights lack {missing}; given: {sorted(named)}")
        sources = [named[spec.name] for spec in self.specs]
        for spec, source in zip(self.specs, sources, strict=True):
            if tuple(source.shape) != spec.shape:
                raise ValueError(
                    f"weights {spec.name!r} have shape {tuple(source.shape)}, expected {spec.shape}"
                )
        return sources

    def _targets(self, module: nn.Module) -> list[Tensor]:
        # Looking the tensors up by name costs more than copying them: remember the last module.
        if self._pulled_into[0] is not module:
            self._pulled_into = (module, self._sources(module))
        return self._pulled_into[1]

    def close(self) -> None:
        """Close the descriptor; the memory lives on until the last view of it is gone."""
        self._arena.close()
