"""A collector that fills a replay buffer: what fits in, and filling it in the background."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import ImmutableDatasetWriter, ReplayBuffer, ReplayBufferEnsemble


class BufferWriter:
    """Writes batches into a replay buffer, step by step where its storage is a row of steps.

    Args:
        buffer: TorchRL's.
        example: a batch ``[B, T]`` of zeros, as it will be written.
        whole_batches: batches are written as they are; False where trajectories are.
        known: the example has the keys of what will be written; False where a user changes it.

    Raises:
        ValueError: the buffer cannot hold such batches.
    """

    def __init__(
        self, buffer: ReplayBuffer, example: TensorDictBase, *, whole_batches: bool, known: bool
    ) -> None:
        if not isinstance(buffer, ReplayBuffer):
            raise ValueError(
                f"replay_buffer must be a torchrl.data.ReplayBuffer, got {type(buffer).__name__}"
            )
        self.buffer = buffer
        if isinstance(buffer, ReplayBufferEnsemble) or isinstance(
            buffer.writer, ImmutableDatasetWriter
        ):
            raise ValueError(
                f"replay_buffer is a {type(buffer).__name__} that cannot be written into; give one "
                "ReplayBuffer with a writer of its own"
            )
        storage = buffer.storage
        self._ndim = int(getattr(storage, "ndim", 1))
        if self._ndim > 2:
            raise ValueError(
                f"replay_buffer's storage has ndim={self._ndim}; batches are [rollout, time]: use "
                "ndim=1 (steps) or ndim=2"
            )
        if self._ndim == 2 and not whole_batches:
            raise ValueError(
                "replay_buffer's storage has ndim=2; whole trajectories are rows of steps: use "
                "ndim=1"
            )
        size, steps = getattr(storage, "max_size", None), example.numel()
        if whole_batches and size is not None and size < steps:
            raise ValueError(
                f"replay_buffer's storage holds {size} steps, a batch frames_per_batch={steps}; "
                "make the storage larger or the batch smaller"
            )
        if known:
            self._check_stored(storage, example)

    def _check_stored(self, storage: Any, example: TensorDictBase) -> None:
        """A storage in use has its keys and shapes already."""
        stored = getattr(storage, "_storage", None)
        if stored is None or len(storage) == 0:
            return
        first = stored[0] if isinstance(stored, list) else stored
        if not isinstance(first, TensorDictBase):
            raise ValueError(
                f"replay_buffer holds {type(first).__name__}s; this collector writes TensorDicts"
            )
        lead = 0 if isinstance(stored, list) else 1
        ours = example[0] if self._ndim == 2 else example.reshape(-1)[0]
        kept = {key: (tuple(v.shape[lead:]), v.dtype) for key, v in first.items(True, True)}
        written = {key: (tuple(v.shape), v.dtype) for key, v in ours.items(True, True)}
        kept.pop("index", None)
        names = kept.keys() | written.keys()
        differing = sorted(str(key) for key in names if kept.get(key) != written.get(key))
        if differing:
            raise ValueError(
                f"replay_buffer holds other data than this collector writes; they differ in "
                f"{', '.join(differing)}"
            )

    def write(self, batch: TensorDictBase) -> None:
        """Add a batch ``[B, T]``."""
        self.buffer.extend(batch.reshape(-1) if self._ndim == 1 else batch)


class BackgroundCollection:
    """Runs a collector's iterator in a thread; it writes into the replay buffer.

    Args:
        batches: the collector; each item is one write done.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._turn = threading.Condition()
        self._pauses = 0
        self._busy = self._stop = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sf_torchrl collector", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        iterator = iter(self._batches)
        try:
            while self._may_go_on():
                next(iterator)
                with self._turn:
                    self._busy = False
                    self._turn.notify_all()
        except StopIteration:
            pass
        except Exception as error:  # raised where the collector is next asked for something
            self.error = error
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()

    def _may_go_on(self) -> bool:
        with self._turn:
            self._turn.wait_for(lambda: self._stop or not self._pauses)
            self._busy = not self._stop
            return self._busy

    @property
    def is_running(self) -> bool:
        """Whether more will be written."""
        return self._thread.is_alive()

    def is_this_thread(self) -> bool:
        """The caller is the one that collects."""
        return threading.current_thread() is self._thread

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is written inside; waits for the batch that is being collected."""
        if self.is_this_thread():  # a hook: nothing goes on beside it
            yield
            return
        with self._turn:
            self._pauses += 1
            self._turn.wait_for(lambda: not self._busy)
        try:
            yield
        finally:
            with self._turn:
                self._pauses -= 1
                self._turn.notify_all()

    def stop(self, timeout: float | None = None) -> None:
        """End after the batch that is being collected, or at once where that is interrupted."""
        with self._turn:
            self._stop = True
            self._turn.notify_all()
        if not self.is_this_thread():
            self._thread.join(timeout)
