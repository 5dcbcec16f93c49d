"""What steps the envs and runs the policy: worker processes, or the main process alone.

Both engines fill slots and say which are full; they share the env splits and the policy server,
so that what is debugged in one holds in the other.
"""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import cloudpickle
import numpy as np
import torch

from sf_torchrl.config import CollectorConfig, inference_and_learner_threads
from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.memory.pipes import (
    Message,
    PipeClosedError,
    PipeReader,
    PipeWriter,
    index_pipe,
)
from sf_torchrl.memory.slab import WAITED, Feature, Slab
from sf_torchrl.memory.weights import WeightStore
from sf_torchrl.models.row_policy import RowPolicy
from sf_torchrl.workers import protocol
from sf_torchrl.workers.env_worker import make_splits
from sf_torchrl.workers.inference_worker import PolicyServer
from sf_torchrl.workers.protocol import (
    EnvWorkerConfig,
    InferenceWorkerConfig,
    PolicyServerConfig,
)
from sf_torchrl.workers.split import EnvSplit
from sf_torchrl.workers.supervisor import (
    Supervisor,
    WorkerError,
    discard_spare_inference_worker,
    spawn,
    spawn_inference_worker,
)

_POLL_MS = 500
"""How often a wait looks whether every process still lives."""


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What both engines work on."""

    config: CollectorConfig
    create_env_fns: tuple[EnvFactory, ...]
    """One a worker."""
    state: tuple[Feature, ...]
    """The policy's recurrent state."""
    slab: Slab
    make_policy: Callable[[], RowPolicy]
    server: PolicyServerConfig
    store: WeightStore
    seed: int
    generation: int
    """Counts starts of the same run, so that a resumed one does not repeat its episodes."""

    def env_seeds(self, worker: int) -> tuple[int, ...]:
        """A seed for every env of a worker, from the run's seed: all different."""
        first = worker * self.config.num_envs_per_worker
        return tuple(
            self._seed(0, first + index) for index in range(self.config.num_envs_per_worker)
        )

    @property
    def specs(self) -> EnvSpecs:
        """What the envs observe and accept."""
        return self.server.specs

    @property
    def inference_seed(self) -> int:
        """Seed of action sampling."""
        return self._seed(1, 0)

    def _seed(self, purpose: int, index: int) -> int:
        sequence = np.random.SeedSequence(self.seed, spawn_key=(self.generation, purpose, index))
        return int(sequence.generate_state(1)[0] >> 1)  # 31 bits: some envs refuse more

    def env_worker_config(self, worker: int) -> EnvWorkerConfig:
        """Config of one env worker."""
        config = self.config
        return EnvWorkerConfig(
            worker=worker,
            create_env_fn=self.create_env_fns[worker],
            specs=self.specs,
            state=self.state,
            layout=self.slab.layout,
            num_splits=config.num_splits,
            num_slots_per_split=config.num_slots_per_split,
            env_seeds=self.env_seeds(worker),
            first_traj_id=(self.generation << 40) + worker * config.num_envs_per_worker,
            num_envs=config.num_envs,
        )


class Engine(Protocol):
    """Fills slots with rollouts."""

    def start(self) -> None:
        """Start whatever is needed; does not wait for it."""

    def begin(self) -> None:
        """The first batch is wanted now; in async mode the workers have begun already."""

    def next_full(self) -> int:
        """Wait for a full slot and return its index."""

    def release(self, slot: int) -> None:
        """Give a slot back to be filled again."""

    def interrupt(self) -> None:
        """Make a wait of another thread raise ``CollectionInterrupted`` soon."""

    def stop(self) -> None:
        """Stop and free everything; may be called twice."""


class CollectionInterrupted(Exception):
    """Nothing more is wanted: the collector is being shut down from another thread."""


class ProcessEngine:
    """Env workers and an inference worker as processes of their own."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._supervisor = Supervisor()
        self._full_slots: deque[int] = deque()
        self._commands: list[PipeWriter] = []
        self._requests: PipeWriter | None = None
        self._full: PipeReader | None = None
        self._start_by = float("inf")
        self._unheard = set(range(parts.config.num_workers))  # no rollout of theirs has come yet
        self._next_check_s = 0.0
        self._interrupted = False

    def start(self) -> None:
        """Start all processes."""
        parts = self._parts
        config = parts.config
        # The inference worker first: it takes longest to import what it needs.
        inference = spawn_inference_worker()
        workers = [
            spawn("sf_torchrl.workers.env_worker", f"env worker {index}")
            for index in range(config.num_workers)
        ]
        requests, requests_end = index_pipe()
        full, full_end = index_pipe()
        command_pipes = [index_pipe() for _ in workers]
        slab_fd = parts.slab.arena.fd
        self._full, self._requests = full, requests_end
        self._commands = [writer for _, writer in command_pipes]
        self._supervisor.children += [*workers, inference]
        try:
            for index, (child, (reader, _)) in enumerate(zip(workers, command_pipes, strict=True)):
                child.setup(
                    parts.env_worker_config(index),
                    [slab_fd, reader.fd, requests_end.fd, full_end.fd],
                )
            inference.setup(
                self._inference_config(),
                [slab_fd, parts.store.fd, requests.fd, *(w.fd for w in self._commands)],
            )
        finally:
            full_end.close()
            requests.close()
            for reader, _ in command_pipes:
                reader.close()
        self._start_by = time.monotonic() + config.env_start_timeout_s
        if config.async_mode:
            self._tell_to_begin()

    def begin(self) -> None:
        """Let the workers begin, where they have waited for the first batch to be wanted."""
        if not self._parts.config.async_mode:
            self._tell_to_begin()

    def _tell_to_begin(self) -> None:
        for commands in self._commands:
            _send_quietly(commands, (protocol.BEGIN, 0, 0, 0))  # of the dead, check() tells

    def _inference_config(self) -> InferenceWorkerConfig:
        parts = self._parts
        return InferenceWorkerConfig(
            import_path=tuple(sys.path),
            policy=cloudpickle.dumps(parts.make_policy),
            layout=parts.slab.layout,
            weight_specs=parts.store.specs,
            server=parts.server,
            seed=parts.inference_seed,
            num_threads=parts.config.inference_threads
            or inference_and_learner_threads(parts.config.num_workers)[0],
        )

    def next_full(self) -> int:
        """Wait for a full slot; looks every half second whether every process still lives.

        Raises:
            WorkerError: a process ended, or no env was ready in time.
        """
        if not self._full_slots:
            self._wait()
        return self._full_slots.popleft()

    def _wait(self) -> None:
        assert self._full is not None, "start() comes first"
        if time.monotonic() >= self._next_check_s:  # one may fail while others still deliver
            self._check()
        poll = select.poll()
        poll.register(self._full.fd, select.POLLIN)
        while not poll.poll(_POLL_MS):
            self._check()
            if self._interrupted:
                raise CollectionInterrupted
        try:
            for worker, _, slot, _ in self._full.receive():
                self._full_slots.append(slot)
                self._unheard.discard(worker)
        except PipeClosedError:  # every env worker is gone
            time.sleep(0.05)  # a moment to become a zombie
            self._supervisor.check()
            raise WorkerError("the env workers closed their pipes and still live") from None

    def _check(self) -> None:
        """Look who lives, and who is late."""
        self._supervisor.check()
        now = time.monotonic()
        self._next_check_s = now + _POLL_MS / 1000
        if self._unheard and now > self._start_by:
            who = ", ".join(str(index) for index in sorted(self._unheard))
            raise WorkerError(
                f"no rollout from env worker {who} within "
                f"env_start_timeout_s={self._parts.config.env_start_timeout_s}: env "
                f"{self._parts.specs.name!r} hangs in its constructor, reset or first steps, or "
                "needs a longer limit"
            )

    def release(self, slot: int) -> None:
        """Tell the slot's owner that it may be written again."""
        config = self._parts.config
        worker = slot // (config.num_splits * config.num_slots_per_split)
        try:
            self._commands[worker].send(protocol.RELEASE, slot)
        except PipeClosedError:
            self._supervisor.check()

    def interrupt(self) -> None:
        """See :class:`Engine`; within half a second."""
        self._interrupted = True

    def stop(self) -> None:
        """Tell every child to stop, then end those that do not."""
        for commands in self._commands:
            _send_quietly(commands, (protocol.STOP, 0, 0, 0))
        if self._requests is not None:
            _send_quietly(self._requests, (protocol.STOP_INFERENCE, 0, 0, 0))
        for end in (*self._commands, self._requests, self._full):
            if end is not None:
                end.close()
        self._commands, self._requests, self._full = [], None, None
        self._supervisor.stop()


def _send_quietly(pipe: PipeWriter, message: Message) -> None:
    with contextlib.suppress(PipeClosedError):
        pipe.send(*message)


class SerialEngine:
    """Everything in the main process, one thing after the other: reproducible bit for bit."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._splits: list[EnvSplit] = []
        self._server: PolicyServer | None = None
        self._waiting: list[int] = []  # splits whose observations await actions
        self._full_slots: deque[int] = deque()
        self._rng_state = torch.Generator().manual_seed(parts.inference_seed).get_state()
        self._interrupted = False

    def start(self) -> None:
        """Make and reset every env."""
        discard_spare_inference_worker()
        parts = self._parts
        with self._own_random_numbers():
            self._splits = make_splits(parts.env_worker_config(0), parts.slab)
            self._server = PolicyServer(parts.make_policy(), parts.slab, parts.store, parts.server)
            for split in self._splits:
                split.reset()
        self._waiting = list(range(len(self._splits)))

    def begin(self) -> None:
        """Nothing: nothing is done before it is asked for."""

    def next_full(self) -> int:
        """Step until a slot is full."""
        if not self._full_slots:
            with self._own_random_numbers():
                while not self._full_slots:
                    if self._interrupted:
                        raise CollectionInterrupted
                    self._step_all()
        return self._full_slots.popleft()

    def _step_all(self) -> None:
        assert self._server is not None, "start() comes first"
        assert self._waiting, "every split is full and none has been released"
        began = time.perf_counter_ns()
        self._server.serve(
            [(0, i, self._splits[i].slot, self._splits[i].step_index) for i in self._waiting]
        )
        served = time.perf_counter_ns()
        going_on = []
        for index in self._waiting:
            split = self._splits[index]
            if not split.step():
                going_on.append(index)
                continue
            self._full_slots.append(split.slot)
            if split.begin_next():
                going_on.append(index)
        self._waiting = going_on
        # One works while the other waits.
        waited = self._parts.slab.numpy(WAITED)
        waited[0] += served - began
        waited[1] += time.perf_counter_ns() - served

    @contextlib.contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Sample from the collector's own generator, whatever else the program draws."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self._rng_state)
        try:
            yield
        finally:
            self._rng_state = torch.get_rng_state()
            torch.set_rng_state(outside)

    def release(self, slot: int) -> None:
        """Let the slot's owner go on."""
        index = slot // self._parts.config.num_slots_per_split
        split = self._splits[index]
        split.release(slot)
        if index not in self._waiting and split.begin_next():
            self._waiting.append(index)
            self._waiting.sort()

    def interrupt(self) -> None:
        """See :class:`Engine`; before the next step."""
        self._interrupted = True

    def stop(self) -> None:
        """Close every env."""
        for split in self._splits:
            split.close()
        self._splits, self._server, self._waiting = [], None, []
