"""garage's sampler: whole episodes from processes that each have an env and an agent of their own.

For meta-learning and for whoever thinks in episodes. Where one policy acts in all envs and steps
are what counts, :class:`~sf_torchrl.SharedMemoryCollector` is many times faster.
"""

from __future__ import annotations

import select
import socket
import warnings
import weakref
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
    EXIT,
    FRAME,
    START,
    STOP,
    Command,
    EpisodeWorkerConfig,
    Frames,
    unpack_episode,
)
from sf_torchrl.workers.episodes import DefaultWorker, WorkerFactory
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
        self.is_dead = False

    def send(self, command: Command) -> None:
        """Hand a command over; one that has died is noted, not raised."""
        body = cloudpickle.dumps(command)
        data = memoryview(FRAME.pack(0, len(body)) + body)
        poll = select.poll()
        poll.register(self.link, select.POLLOUT)
        while data and not self.is_dead:
            try:
                data = data[self.link.send(data) :]
            except BlockingIOError:  # it is in the middle of an episode
                self.is_dead = not poll.poll(_POLL_MS) and self.child.failed
            except OSError:
                self.is_dead = True

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
    never waits to hand an episode over; while eight are not taken it begins no further one. An
    episode belongs to the call it was collected for: one that is left over when the next call
    begins, which may bring another agent, is not returned.

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
        agents = factory.prepare_worker_messages(self._agents)
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
            ValueError: a list of another length than there are workers.
            TypeError: an ``env_update`` of another kind.
            WorkerError: every worker has died; has a traceback.
            RuntimeError: the sampler has been shut down.
        """
        self._begin(agent_update, env_update, quota=None)
        found: list[EpisodeBatch] = []
        steps = 0
        while steps < num_samples:
            for _, episode in self._take():
                found.append(episode)
                steps += episode.num_steps
            self._warn_of_the_dead()
        for worker in self._workers:
            worker.send(Command(kind=STOP))
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
                found[number].append(episode)
            for worker in self._workers:
                if worker.is_dead and len(found[worker.number]) < n_eps_per_worker:
                    raise WorkerError(worker.child.obituary())
        return self._joined([episode for episodes in found for episode in episodes])

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
        self._agent_version += 1
        for worker, agent, env in zip(self._workers, agents, envs, strict=True):
            worker.send(
                Command(
                    kind=START,
                    version=self._agent_version,
                    agent_update=agent,
                    env_update=env,
                    quota=quota,
                )
            )

    def _take(self) -> Iterator[tuple[int, EpisodeBatch]]:
        """Wait for episodes of this call, or until it is time to look who lives."""
        poll = select.poll()
        by_fd = {worker.link.fileno(): worker for worker in self._workers if not worker.is_dead}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_POLL_MS) if by_fd else []:
            worker = by_fd[fd]
            for version, dropped, episode in worker.receive():
                self._warn_of_dropped(dropped)
                if version == self._agent_version:
                    yield worker.number, episode

    def _warn_of_the_dead(self) -> None:
        notes = [w.child.obituary() for w in self._workers if w.is_dead]
        if len(notes) == len(self._workers):
            raise WorkerError(notes[0])
        for note in notes:
            self._warn_once(f"{note}\nThe other workers go on without it")

    def _warn_of_dropped(self, names: Sequence[str]) -> None:
        for name in names:
            self._warn_once(f"{name} is no number in every step and is left out of the episodes")

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

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


def _checked_update(update: Any) -> Any:
    if update is None or isinstance(update, EnvUpdate | gymnasium.Env):
        return update
    raise TypeError(
        f"env_update is {update!r}; it must be an EnvUpdate, an env, None, or a list of these"
    )


def _end(supervisor: Supervisor, workers: list[_Worker]) -> None:
    for worker in workers:
        if not worker.is_dead:
            worker.send(Command(kind=EXIT))
    supervisor.stop()
    for worker in workers:
        worker.link.close()
    workers.clear()
