"""What the processes say to each other: the meaning of each message, and how a child is set up.

Free of torch: env workers use it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.memory.pipes import PipeClosedError
from sf_torchrl.memory.slab import Feature, Key, SlabLayout

# Messages to an env worker: (ACT, split, 0, 0), (RELEASE, slot, 0, 0), (STOP, 0, 0, 0),
# (BEGIN, 0, 0, 0).
ACT = 0  # the actions of a split's current step lie in the slab
RELEASE = 1  # the learner has copied a slot: it may be written again
STOP = 2
BEGIN = 3  # ask for the first actions: in sync mode not before the first batch is wanted
# Requests to the inference worker: (worker, split, slot, step); STOP is worker -1.
# Announcements to the collector: (worker, split, slot, 0): the slot holds a finished rollout.
STOP_INFERENCE = -1

_HEADER = struct.Struct("<QI")  # bytes of the payload, number of descriptors
_MAX_REPORT = 16_384  # characters
_FDS_A_MESSAGE = 64  # the kernel's limit is 253


@dataclass(frozen=True, kw_only=True)
class EnvWorkerConfig:
    """All an env worker needs besides its three descriptors (slab, commands, requests, full)."""

    worker: int
    create_env_fn: EnvFactory
    specs: EnvSpecs
    state: tuple[Feature, ...]
    """The policy's recurrent state: reset where an episode begins."""
    layout: SlabLayout
    num_splits: int
    num_slots_per_split: int
    env_seeds: tuple[int, ...]
    """One a env, over all splits in order."""
    first_traj_id: int
    """Trajectory id of the first env's first episode; each env after it has the next one."""
    num_envs: int
    """Envs of all workers: trajectory ids count in steps of it."""


@dataclass(frozen=True, kw_only=True)
class PolicyServerConfig:
    """What the policy reads and writes."""

    specs: EnvSpecs
    in_keys: tuple[Key, ...]
    out_keys: tuple[Key, ...]
    state_keys: tuple[Key, ...]
    """Recurrent state, in the order in which the policy returns it, after the out-keys."""
    core_state_keys: tuple[Key, ...]
    """Recurrent state stored where rollouts begin only; returned last."""
    device: str
    """Where the policy runs."""
    random_steps: int
    """Env steps for which actions are random at first."""


@dataclass(frozen=True, kw_only=True)
class InferenceWorkerConfig:
    """All the inference worker needs besides its descriptors."""

    import_path: tuple[str, ...]
    """The parent's ``sys.path`` now: this child may have been started ahead of need."""
    policy: bytes
    """A function that returns a ``RowPolicy``, pickled by cloudpickle: unpickled once the import
    path is set."""
    layout: SlabLayout
    weight_specs: tuple[Any, ...]
    server: PolicyServerConfig
    seed: int
    num_threads: int


def slot_of(worker: int, split: int, num_splits: int, num_slots_per_split: int) -> int:
    """First slot of a split. A (worker, split) owns its slots for life."""
    return (worker * num_splits + split) * num_slots_per_split


def send_setup(control: socket.socket, payload: bytes, fds: list[int]) -> None:
    """Parent's side: hand a child its pickled config and its descriptors."""
    control.sendall(_HEADER.pack(len(payload), len(fds)))
    for first in range(0, len(fds), _FDS_A_MESSAGE):
        socket.send_fds(control, [b"f"], fds[first : first + _FDS_A_MESSAGE])
    control.sendall(payload)


def receive_setup(control: socket.socket) -> tuple[Any, list[int]]:
    """Child's side of :func:`send_setup`.

    Raises:
        EOFError: the parent is gone.
    """
    nbytes, num_fds = _HEADER.unpack(_receive_exactly(control, _HEADER.size))
    fds: list[int] = []
    while len(fds) < num_fds:
        marker, received, _, _ = socket.recv_fds(control, 1, _FDS_A_MESSAGE)
        if not marker:
            raise EOFError
        fds += received
    for fd in fds:
        os.set_inheritable(fd, False)  # not for the processes that an env starts
    # From our own parent, over an inherited socket.
    return pickle.loads(_receive_exactly(control, nbytes)), fds


def _receive_exactly(control: socket.socket, nbytes: int) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        part = control.recv(nbytes - len(received))
        if not part:
            raise EOFError
        received += part
    return bytes(received)


def report(control: socket.socket, event: str, **fields: Any) -> None:
    """Child's side: tell the parent something, one JSON line."""
    with contextlib.suppress(OSError):
        control.sendall(json.dumps({"event": event, **fields}).encode() + b"\n")


def run_child(main: Callable[[Any, list[int]], None]) -> None:
    """Body of every child: be a good child, get the config, run, report what went wrong."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    # Ctrl-C and friends reach the main process alone, which then stops its children in order.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    try:
        config, fds = receive_setup(control)
    except EOFError:
        return
    _die_with_parent(control)
    with _reported(control):
        report(control, "started")
        main(config, fds)


@contextlib.contextmanager
def _reported(control: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # an env may raise SystemExit: a failure like any other
        if not isinstance(error, PipeClosedError):  # that follows from another's death
            # The parent reads it once this process has ended: it must fit the socket's buffer.
            trace = traceback.format_exc()[-_MAX_REPORT:]
            report(control, "error", error=repr(error)[:_MAX_REPORT], traceback=trace)
        os._exit(1)


def do_not_preempt() -> None:
    """Wait for a core to be free instead of taking it from another process at each wake (Linux).

    Where processes outnumber cores, more requests then wait for one forward pass, and a learner of
    pictures keeps its cache. On two cores: of the inference worker, 5 % more env steps/s with
    CartPole; of env workers 12 % with VizDoom, and 3 % less with CartPole, so only with pictures.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _die_with_parent(control: socket.socket) -> None:
    """End with the parent, and with whatever the env has started, however the parent ends.

    End of file on the socket is the sign. On Linux the kernel answers it with SIGKILL to the whole
    process group, so that it works while an env holds the interpreter's lock; elsewhere a thread
    does. The parent sends nothing after the setup.
    """
    if sys.platform == "linux":
        fcntl.fcntl(control, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(control, fcntl.F_GETFL)
        fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
        if select.select([control], [], [], 0)[0]:  # it went before this was armed
            os._exit(1)
    else:
        threading.Thread(target=_watch, args=[control], daemon=True).start()


def _watch(control: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while control.recv(1):
            pass
    with contextlib.suppress(OSError):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
