"""garage's sampler: whole episodes from processes that each have an env and an agent of their own.

For meta-learning and for whoever thinks in episodes. Where one policy acts in all envs and steps
are what counts, :class:`~sf_torchrl.SharedMemoryCollector` is many times faster.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import cloudpickle
import gymnasium

from sf_torchrl.env_updates import (
    EnvUpdate,
    ExistingEnvUpdate,
    NewEnvUpdate,
    SetTaskUpdate,
    as_env_update,
)
from sf_torchrl.memory.episodes import EpisodeBatch, StepType
from sf_torchrl.workers.episode_worker import (
    FRAME,
    START,
    STOP,
    Command,
    EpisodeWorkerConfig,
    Frames,
    unpack_episode,
)
from sf_torchrl.workers.episodes import DefaultWorker, WorkerFactory, checked_agent
from sf_torchrl.workers.supervisor import Child, Supervisor, WorkerError, check_picklable, spawn

__all__ = [
    "DefaultWorker",
    "EnvUpdate",
    "EpisodeBatch",
    "ExistingEnvUpdate",
    "MultiprocessingSampler",
    "NewEnvUpdate",
    "SetTaskUpdate",
    "StepType",
    "WorkerFactory",
]

_POLL_MS = 500
"""How often a wait looks whether every worker still lives."""


class _Worker:
    """One worker process, from the sampler's side."""

    def __init__(self, number: int, child: Child, link: socket.socket) -> None:
        link.setblocking(False)
        self.number, self.child, self.link = number, child, link
        self._frames = Frames()
        self._unsent: deque[memoryview] = deque()
        self.is_dead = False

    def tell(self, command: Command, *updates: bytes) -> None:
        """Hand a command over without waiting; the rest follows in :meth:`send`."""
        header = pickle.dumps(command)
        frame = FRAME.pack(len(header), sum(map(len, updates))) + header
        self._unsent.extend(memoryview(part) for part in (frame, *updates) if part)
        self.send()

    def send(self) -> None:
        """As much as the socket takes: in the middle of an episode a worker does not read."""
        while self._unsent and not self.is_dead:
            try:
                part = self._unsent.popleft()
                rest = part[self.link.send(part) :]
            except BlockingIOError:
                self._unsent.appendleft(part)
                return
            except OSError:
                return  # it has died; what it sent before is still to be read
            if rest:
                self._unsent.appendleft(rest)

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | (select.POLLOUT if self._unsent else 0)

    def receive(self) -> Iterator[tuple[int, list[str], EpisodeBatch]]:
        """Episodes that have come completely."""
        try:
            data = self.link.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.is_dead = not data
        for header, body in self._frames.feed(data):
            yield unpack_episode(header, body)


class MultiprocessingSampler:
    """Whole episodes from worker processes; the calls are those of garage's sampler.

    Every worker has an agent and an env of its own and collects while the sampler waits for it. It
    can be told something at any time but within an episode; while the sampler has not taken its
    episodes it begins no further one. An episode belongs to the call it was collected for: one that
    is left over when the next call begins, which may bring another agent, is not returned.

    Args:
        agents: an agent, or a list with one for each worker: anything with garage's
            ``get_action(observation)``, which returns the action and a dict; a TensorDict module,
            whose further out-keys become infos; or a function from observation to action.
        envs: an env, env id, function that makes one, or ``EnvUpdate``, or a list with one for
            each worker. An env is copied for each.

    Keyword Args:
        worker_factory: how workers are made; instead of the arguments that follow.
        max_episode_length: steps after which an episode is cut off.
        seed: worker ``i`` gets ``seed + i``.
        n_workers: processes; the machine's cores by default.
        worker_class: :class:`DefaultWorker`, or a subclass of it.
        worker_args: further keyword arguments of the class.

    Raises:
        TypeError: neither ``worker_factory`` nor ``max_episode_length``; something that is no env.
        ValueError: a list of another length than there are workers, something that cannot be sent
            to a process.
    """

    def __init__(  # noqa: PLR0913 (garage's)
        self,
        agents: Any,
        envs: Any,
        *,
        worker_factory: WorkerFactory | None = None,
        max_episode_length: int | None = None,
        seed: int | None = None,
        n_workers: int | None = None,
        worker_class: type[DefaultWorker] = DefaultWorker,
        worker_args: dict[str, Any] | None = None,
    ) -> None:
        if worker_factory is None and max_episode_length is None:
            raise TypeError("Must construct a sampler from worker_factory or max_episode_length")
        if worker_factory is None:
            assert max_episode_length is not None
            worker_factory = WorkerFactory(
                max_episode_length=max_episode_length,
                seed=seed,
                n_workers=n_workers,
                worker_class=worker_class,
                worker_args=worker_args,
            )
        self._factory, self._agents, self._envs = worker_factory, agents, envs
        self.total_env_steps = 0
        """Steps of all episodes returned so far."""
        self._agent_version = 0
        self._warned: set[str] = set()
        self._start()

    @classmethod
    def from_worker_factory(
        cls, worker_factory: WorkerFactory, agents: Any, envs: Any
    ) -> MultiprocessingSampler:
        """A sampler whose workers the factory makes."""
        return cls(agents, envs, worker_factory=worker_factory)

    def _start(self) -> None:
        factory = self._factory
        agents = factory.prepare_worker_messages(self._agents, checked_agent)
        envs = factory.prepare_worker_messages(self._envs, as_env_update)
        configs = [
            EpisodeWorkerConfig(make_worker=partial(factory, number), agent=agent, env=env)
            for number, (agent, env) in enumerate(zip(agents, envs, strict=True))
        ]
        for config in configs:
            check_picklable("agents, envs or worker_class", config)
        self._supervisor = Supervisor()
        self._workers: list[_Worker] = []
        # However the sampler goes - forgotten, interpreter exit - the workers end.
        self._finalizer = weakref.finalize(self, _end, self._supervisor, self._workers)
        for number, config in enumerate(configs):
            child = spawn("sf_torchrl.workers.episode_worker", f"sampler worker {number}")
            self._supervisor.children.append(child)
            ours, theirs = socket.socketpair()
            with theirs:
                child.setup(config, [theirs.fileno()])
            self._workers.append(_Worker(number, child, ours))

    def obtain_samples(
        self, itr: int | None, num_samples: int, agent_update: Any, env_update: Any = None
    ) -> EpisodeBatch:
        """Whole episodes with at least so many steps together, as they come.

        A worker that has died is warned of, as long as another lives. Episodes that are over early
        come more often than long ones; exact sampling has no such bias.

        Args:
            itr: ignored, as in garage.
            num_samples: steps.
            agent_update: parameters (dict, tuple or array), a new agent, or None; a list has one
                for each worker.
            env_update: an ``EnvUpdate``, a new env, or None; a list has one for each worker.

        Raises:
            ValueError: ``num_samples`` is not positive, or a list of another length than there are
                workers.
            TypeError: an ``env_update`` of another kind.
            WorkerError: every worker has died; has a traceback.
            RuntimeError: the sampler has been shut down.
        """
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples} must be at least 1")
        self._begin(agent_update, env_update, quota=None)
        found: list[EpisodeBatch] = []
        steps = 0
        try:
            while steps < num_samples:
                for _, episode in self._take():
                    found.append(episode)
                    steps += episode.num_steps
                self._warn_of_the_dead()
        finally:
            for worker in self._workers:
                worker.tell(Command(kind=STOP))
        return self._joined(found)

    def obtain_exact_episodes(
        self, n_eps_per_worker: int, agent_update: Any, env_update: Any = None
    ) -> EpisodeBatch:
        """So many whole episodes from each worker: all of worker 0 first, then of 1, and so on.

        Args:
            n_eps_per_worker: episodes of each worker.
            agent_update: as for :meth:`obtain_samples`.
            env_update: as for :meth:`obtain_samples`.

        Raises:
            ValueError: not positive, or a list of another length than there are workers.
            TypeError: an ``env_update`` of another kind.
            WorkerError: a worker has died before it had given its episodes; has its traceback.
            RuntimeError: the sampler has been shut down.
        """
        if n_eps_per_worker < 1:
            raise ValueError(f"n_eps_per_worker={n_eps_per_worker} must be at least 1")
        self._begin(agent_update, env_update, quota=n_eps_per_worker)
        found: list[list[EpisodeBatch]] = [[] for _ in self._workers]
        while any(len(episodes) < n_eps_per_worker for episodes in found):
            for number, episode in self._take():
                found[number] += episode.split() if episode.num_episodes > 1 else [episode]
            for worker in self._workers:
                if worker.is_dead and len(found[worker.number]) < n_eps_per_worker:
                    raise WorkerError(worker.child.obituary())
        # A rollout of a user's own worker may be several episodes: more than were asked for.
        return self._joined([e for episodes in found for e in episodes[:n_eps_per_worker]])

    def obtain_exact_trajectories(
        self, n_traj_per_worker: int, agent_update: Any, env_update: Any = None
    ) -> EpisodeBatch:
        """:meth:`obtain_exact_episodes` by its earlier name."""
        return self.obtain_exact_episodes(n_traj_per_worker, agent_update, env_update)

    def _begin(self, agent_update: Any, env_update: Any, quota: int | None) -> None:
        """Tell every worker to collect for a new call."""
        if not self._workers:
            raise RuntimeError("this sampler has been shut down; make a new one")
        agents = self._factory.prepare_worker_messages(agent_update)
        envs = self._factory.prepare_worker_messages(env_update, _checked_update)
        # All is pickled before anything is sent: what cannot be leaves no worker ahead of another.
        pickled = list(zip(_pickled(agents), _pickled(envs), strict=True))
        self._agent_version += 1
        for worker, (agent, env) in zip(self._workers, pickled, strict=True):
            command = Command(
                kind=START, version=self._agent_version, agent_bytes=len(agent), quota=quota
            )
            worker.tell(command, agent, env)

    def _take(self) -> Iterator[tuple[int, EpisodeBatch]]:
        """Wait for episodes of this call, or until it is time to look who lives."""
        poll = select.poll()
        by_fd = {worker.link.fileno(): worker for worker in self._workers if not worker.is_dead}
        for fd, worker in by_fd.items():
            poll.register(fd, worker.events)
        failed = {fd for fd, worker in by_fd.items() if worker.child.failed}
        ready = dict(poll.poll(_POLL_MS)) if by_fd else {}
        for fd, events in ready.items():
            worker = by_fd[fd]
            if events & select.POLLOUT:
                worker.send()
            if events & ~select.POLLOUT:
                yield from self._received(worker)
        # Ended, and all that it sent is read; a process that its env forked may keep the socket
        # open, so that no end of file tells of it.
        for fd in failed:
            if not ready.get(fd, 0) & ~select.POLLOUT:
                by_fd[fd].is_dead = True

    def _received(self, worker: _Worker) -> Iterator[tuple[int, EpisodeBatch]]:
        for version, dropped, episode in worker.receive():
            self._warn_of_dropped(dropped)
            if version == self._agent_version:
                yield worker.number, episode

    def _warn_of_the_dead(self) -> None:
        notes = [w.child.obituary() for w in self._workers if w.is_dead]
        if len(notes) == len(self._workers):
            raise WorkerError(notes[0])
        for note in notes:
            self._warn_once(f"{note}\nThe other workers go on without it", 4)

    def _warn_of_dropped(self, names: Sequence[str]) -> None:
        for name in names:
            self._warn_once(f"{name} is no number in every step and is left out of the episodes", 6)

    def _warn_once(self, message: str, depth: int) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=depth)

    def _joined(self, episodes: list[EpisodeBatch]) -> EpisodeBatch:
        batch = EpisodeBatch.concatenate(*episodes)
        self.total_env_steps += batch.num_steps
        return batch

    def shutdown_worker(self) -> None:
        """End every worker; may be called twice."""
        self._finalizer()

    def __getstate__(self) -> dict[str, bytes]:
        parts = (self._factory, self._agents, self._envs)
        return {"parts": cloudpickle.dumps(parts)}

    def __setstate__(self, state: dict[str, bytes]) -> None:
        """The same sampler with fresh workers; it has collected nothing yet."""
        factory, agents, envs = cloudpickle.loads(state["parts"])
        self.__init__(agents, envs, worker_factory=factory)  # type: ignore[misc]


def _pickled(updates: list[Any]) -> list[bytes]:
    """Each once, however many workers get it."""
    by_id = {id(update): update for update in updates}
    pickled = {key: cloudpickle.dumps(update) for key, update in by_id.items()}
    return [pickled[id(update)] for update in updates]


def _checked_update(update: Any) -> Any:
    if update is None or isinstance(update, EnvUpdate | gymnasium.Env):
        return update
    raise TypeError(
        f"env_update is {update!r}; it must be an EnvUpdate, an env, None, or a list of these"
    )


def _end(supervisor: Supervisor, workers: list[_Worker]) -> None:
    for worker in workers:
        # An end of file reaches a worker even where no further byte fits into the socket.
        with contextlib.suppress(OSError):
            worker.link.shutdown(socket.SHUT_WR)
    supervisor.stop()
    for worker in workers:
        worker.link.close()
    workers.clear()
