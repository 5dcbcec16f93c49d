"""The sampler's worker process: whole episodes, handed over without ever waiting to send.

Commands come over a socket of their own, pickled by the parent. Episodes go back over it as a line
of JSON and raw arrays: the parent unpickles nothing. While an episode waits for room in the socket
no further one is begun, but commands are heard.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import select
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sf_torchrl.memory.episodes import NUMERIC, EpisodeBatch, Tree
from sf_torchrl.workers import protocol
from sf_torchrl.workers.episodes import DefaultWorker

FRAME = struct.Struct("<QQ")
"""Bytes of a frame's header and of its body."""
START, STOP = "start", "stop"


@dataclass(frozen=True, kw_only=True)
class EpisodeWorkerConfig:
    """All a sampler's worker needs besides its socket."""

    make_worker: Callable[[], DefaultWorker]
    agent: Any
    env: Any


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the sampler tells a worker: a frame's header. Its body is the pickled updates."""

    kind: str
    version: int = 0
    """Episodes carry the version of the call that they were collected for."""
    agent_bytes: int = 0
    """Size of the agent's update, which comes first; the env's is the rest."""
    quota: int | None = None
    """Episodes to collect; None goes on until told to stop."""


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Header and body of every frame that is complete now."""
        self._data += data
        while len(self._data) >= FRAME.size:
            header, body = FRAME.unpack_from(self._data)
            end = FRAME.size + header + body
            if len(self._data) < end:
                return
            middle = FRAME.size + header
            yield bytes(self._data[FRAME.size : middle]), bytes(self._data[middle:end])
            del self._data[:end]


def pack_episode(version: int, episode: EpisodeBatch) -> bytes:
    """A frame: names, dtypes and shapes, then the arrays; what is no number is named only."""
    leaves, arrays, dropped = [], [], []
    for field in fields(episode):
        for path, array in _leaves((field.name,), getattr(episode, field.name)):
            if array.dtype.kind not in NUMERIC:
                dropped.append(".".join(path))
                continue
            arrays.append(np.ascontiguousarray(array).tobytes())
            leaves.append([path, array.dtype.str, array.shape])
    header = json.dumps({"version": version, "leaves": leaves, "dropped": dropped}).encode()
    body = b"".join(arrays)
    return FRAME.pack(len(header), len(body)) + header + body


def _leaves(path: tuple[str, ...], tree: Tree) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not isinstance(tree, dict):
        yield path, tree
        return
    for name, part in tree.items():
        yield from _leaves((*path, str(name)), part)


def unpack_episode(header: bytes, body: bytes) -> tuple[int, list[str], EpisodeBatch]:
    """Version, names of what was left out, and the episode of a frame."""
    told = json.loads(header)
    parts: dict[str, Any] = {"env_infos": {}, "agent_infos": {}}
    offset = 0
    for path, dtype, shape in told["leaves"]:
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(body, dtype, count, offset).reshape(shape).copy()
        offset += array.nbytes
        target = parts
        for name in path[:-1]:
            target = target.setdefault(name, {})
        target[path[-1]] = array
    return told["version"], told["dropped"], EpisodeBatch(**parts)


class EpisodeWorker:
    """The loop of a sampler's worker process.

    Args:
        worker: what rolls out.
        link: to the sampler; made non-blocking.
    """

    def __init__(self, worker: DefaultWorker, link: socket.socket) -> None:
        link.setblocking(False)
        self._worker, self._link = worker, link
        self._frames = Frames()
        self._unsent = memoryview(b"")
        self._version = 0
        self._to_collect: float = 0.0

    def run(self) -> None:
        """Until the sampler closes its end."""
        poll = select.poll()
        while True:
            # An episode too large for the socket is handed over before the next one is begun:
            # it would else wait in here until that one is over.
            is_busy = self._to_collect > 0 and not self._unsent
            poll.register(self._link, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events = dict(poll.poll(0 if is_busy else None)).get(self._link.fileno(), 0)
            if events & select.POLLOUT:
                self._send()
            if events & ~select.POLLOUT:
                data = self._link.recv(1 << 20)
                if not data:
                    return
                for header, body in self._frames.feed(data):
                    # From our own parent, over an inherited socket.
                    self._obey(pickle.loads(header), memoryview(body))
            elif is_busy:
                episode = self._worker.rollout()
                self._to_collect -= episode.num_episodes
                self._unsent = memoryview(pack_episode(self._version, episode))
                self._send()

    def _obey(self, command: Command, updates: memoryview) -> None:
        self._to_collect = 0.0
        if command.kind == START:
            self._worker.update_agent(pickle.loads(updates[: command.agent_bytes]))
            self._worker.update_env(pickle.loads(updates[command.agent_bytes :]))
            self._version = command.version
            self._to_collect = float("inf") if command.quota is None else command.quota

    def _send(self) -> None:
        """As much as the socket takes."""
        while self._unsent:
            try:
                self._unsent = self._unsent[self._link.send(self._unsent) :]
            except BlockingIOError:
                return


def _main(config: EpisodeWorkerConfig, fds: list[int]) -> None:
    worker = config.make_worker()
    worker.update_agent(config.agent)
    worker.update_env(config.env)
    # The env of a worker that fails is not closed: what went wrong is told at once, and a close()
    # that hangs after a failure would keep it from being told at all.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the sampler is gone
        EpisodeWorker(worker, socket.socket(fileno=fds[0])).run()
    worker.shutdown()


if __name__ == "__main__":
    protocol.run_child(_main)
