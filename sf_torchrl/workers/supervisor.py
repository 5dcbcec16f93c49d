"""The supervisor: starts the worker processes, notices when one ends, and ends them all.

Children are started with ``subprocess`` on ``python -m sf_torchrl.workers...``: no fork, and no
re-import of the user's script, so that no ``if __name__ == "__main__"`` guard is needed. Each gets
its config and descriptors over a socket pair, whose end of file is also what tells it that the
main process has gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from sf_torchrl.workers.protocol import send_setup

_SCRUBBED = (
    "LOCAL_RANK",
    "GLOBAL_RANK",
    "RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PL_GLOBAL_SEED",
)  # a child that saw these would take itself for a rank of the training job
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_STOP_GRACE_S = 2.0


class WorkerError(RuntimeError):
    """A worker process failed; the message has its traceback."""


def _child_environment() -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _SCRUBBED and not name.startswith("TORCHELASTIC_")
    }
    environment.update(dict.fromkeys(_ONE_THREAD, "1"))
    # The parent's import path, its order included; an empty entry means the working directory.
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["PYTHONSAFEPATH"] = "1"
    return environment


@dataclass
class Child:
    """One worker process."""

    name: str
    """For messages, e.g. ``env worker 1``."""
    process: subprocess.Popen[bytes]
    control: socket.socket
    reports: list[dict[str, Any]] = field(default_factory=list)
    _unread: bytes = b""

    def setup(self, config: Any, fds: list[int]) -> None:
        """Send the child what it needs to begin.

        Raises:
            WorkerError: it has already ended.
        """
        try:
            send_setup(self.control, cloudpickle.dumps(config), fds)
        except OSError:
            raise WorkerError(self.obituary()) from None

    def read_reports(self) -> None:
        """Take in what the child has reported so far, without waiting."""
        poll = select.poll()  # select() refuses descriptors from 1024 on
        poll.register(self.control, select.POLLIN)
        while poll.poll(0):
            try:
                data = self.control.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            self.reports += [json.loads(line) for line in lines]

    @property
    def failed(self) -> bool:
        """It has ended without being told to."""
        return self.process.poll() is not None

    def obituary(self) -> str:
        """Why it ended: its traceback, or the signal that killed it."""
        code = self.process.wait()
        self.read_reports()
        for entry in self.reports:
            if entry["event"] == "error":
                return f"{self.name} failed with {entry['error']}\n{entry['traceback']}"
        if code < 0:
            hint = "; if memory was short, the kernel did it" if code == -signal.SIGKILL else ""
            return f"{self.name} was killed by {signal.Signals(-code).name}{hint}"
        return f"{self.name} ended with exit code {code}"


def spawn(module: str, name: str) -> Child:
    """Start ``python -m module``; it waits for its setup while it imports what it needs."""
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_child_environment(),
            start_new_session=True,  # Ctrl-C reaches the main process alone; killed as a group
        )
    finally:
        theirs.close()
    return Child(name, process, ours)


_spare_inference_worker: list[Child] = []


def prewarm_inference_worker() -> None:
    """Start an inference worker ahead of need, to import torch while the main process does."""
    if not _spare_inference_worker:
        _spare_inference_worker.append(_start_inference_worker())


def spawn_inference_worker() -> Child:
    """An inference worker waiting for its setup: the one started ahead, or a new one."""
    if _spare_inference_worker and not _spare_inference_worker[0].failed:
        return _spare_inference_worker.pop()
    return _start_inference_worker()


def discard_spare_inference_worker() -> None:
    """End the one started ahead, where it turns out that none is needed."""
    while _spare_inference_worker:
        kill_group(_spare_inference_worker.pop())


def _start_inference_worker() -> Child:
    return spawn("sf_torchrl.workers.inference_worker", "inference worker")


def check_picklable(name: str, value: object) -> None:
    """Before any process starts.

    Raises:
        ValueError: a worker process could not be given it.
    """
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be sent to a worker process: {type(error).__name__}: {error}. Make "
            "what cannot be pickled inside it, or use num_workers=0"
        ) from error


class Supervisor:
    """The children of one collector, from start to end."""

    def __init__(self) -> None:
        self.children: list[Child] = []

    def check(self) -> None:
        """Notice deaths; cheap.

        Raises:
            WorkerError: a child has ended; where several have, the one that says why.
        """
        dead = [child for child in self.children if child.failed]
        if not dead:
            return
        notes = [child.obituary() for child in dead]
        # When one process dies others follow, silently: report the cause.
        notes.sort(key=lambda note: "failed with" not in note and "killed by" not in note)
        raise WorkerError(notes[0])

    def stop(self) -> None:
        """End every child: those told to stop get a moment, then their groups are killed."""
        deadline = time.monotonic() + _STOP_GRACE_S
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            kill_group(child)
        self.children.clear()


def kill_group(child: Child) -> None:
    """Kill a child and whatever it has started, and take in its exit code."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)
    child.process.wait()
    child.control.close()
