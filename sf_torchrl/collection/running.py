"""The running side of a collector: starting the workers, yielding batches, ending it all."""

from __future__ import annotations

import contextlib
import weakref
from abc import abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from tensordict.nn.probabilistic import interaction_type
from torchrl.data import ReplayBuffer

from sf_torchrl.collection.postprocess import PostProcessor
from sf_torchrl.collection.publishing import PublishingCollector
from sf_torchrl.collection.replay import BackgroundCollection, BufferWriter
from sf_torchrl.config import CollectorConfig
from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.memory.batch import BatchAssembler, Episode
from sf_torchrl.memory.slab import MODE, WAITED, Slab, SlabLayout
from sf_torchrl.models.given_policy import published_module
from sf_torchrl.models.policy_io import PolicyIO
from sf_torchrl.models.row_policy import EXPLORATION, RowPolicy
from sf_torchrl.workers.engines import (
    CollectionInterrupted,
    Engine,
    EngineParts,
    ProcessEngine,
    SerialEngine,
)
from sf_torchrl.workers.protocol import PolicyServerConfig

RETURN_WINDOW = 100
"""Episodes over which mean return and length are reported; Sample Factory's stats_avg."""


class RunningCollector(PublishingCollector):
    """What a collector does once it is made; a subclass makes it and sets what is declared here."""

    config: CollectorConfig
    env_specs: EnvSpecs
    exploration_type: InteractionType
    compact_obs: bool
    init_random_frames: int
    replay_buffer: ReplayBuffer | None
    total_frames: int | float
    _factories: tuple[EnvFactory, ...]
    _io: PolicyIO
    _postprocess: PostProcessor
    _seed: int
    _writer: BufferWriter | None

    def __init__(
        self,
        pre_collect_hook: Callable[[], None] | None,
        post_collect_hook: Callable[[TensorDictBase], None] | None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self._generation = 0
        self._frames = 0
        self._iter = -1
        self._episodes: deque[Episode] = deque(maxlen=RETURN_WINDOW)
        self._num_episodes = 0
        self._engine: Engine | None = None
        self._background: BackgroundCollection | None = None
        self._closed = self._begun = False
        self._unread: deque[tuple[int, int]] = deque()  # (slot, first rollout not yet copied)
        self._to_release: list[int] = []
        self.pin_memory = False
        """Page-locked batches, for a learner on a GPU; to be set before the first batch."""
        self._ignore_rb = False  # set by TorchRL while it assembles trajectories

    @abstractmethod
    def _make_row_policy(self) -> Callable[[], RowPolicy]:
        """What makes the policy where it is to run."""

    def _layout(self) -> SlabLayout:
        config, specs = self.config, self.env_specs
        return SlabLayout(
            num_workers=max(config.num_workers, 1),
            num_slots=config.num_slots,
            envs_per_slot=config.envs_per_split,
            rollout_length=config.rollout_length,
            observation=(*specs.observation, *self._io.state, *specs.tracked),
            core_state=self._io.core_state,
            policy=self._io.outputs,
            reward=specs.reward,
            done=specs.done,
        )

    def _empty_batch(self) -> TensorDict:
        slab = Slab(self._layout())
        batch = BatchAssembler(slab, self.config.rollouts_per_batch, self.compact_obs).finish()
        slab.close()
        return batch.zero_()

    def fake_tensordict(self) -> TensorDictBase:
        """A batch of zeros with the keys, dtypes and shapes of those to come."""
        return self._postprocess(self._empty_batch())

    def start(self) -> None:
        """Start the workers without waiting for them; the first batch does it otherwise.

        With a replay buffer, fill it from now on, in a thread, until ``total_frames``.

        Raises:
            RuntimeError: the collector has been shut down, or is to fill a buffer without worker
                processes: acting in a thread would share the exploration type and the random
                numbers of whatever else this process does.
        """
        if self.replay_buffer is not None and self.config.num_workers == 0:
            raise RuntimeError(
                "start() with a replay buffer needs worker processes, got num_workers=0; set "
                "num_workers=1, or iterate over the collector"
            )
        self._start_workers()
        if self.replay_buffer is not None and self._background is None:
            self._background = BackgroundCollection(self)

    def _start_workers(self) -> None:
        if self._engine is not None:
            return
        if self._closed:
            raise RuntimeError("this collector has been shut down; make a new one")
        config, io = self.config, self._io
        self._slab = Slab(self._layout())
        self._mode = self._slab.numpy(MODE)
        self._set_mode()
        parts = EngineParts(
            config=config,
            create_env_fns=self._factories,
            state=io.state,
            slab=self._slab,
            make_policy=self._make_row_policy(),
            server=PolicyServerConfig(
                specs=self.env_specs,
                in_keys=io.in_keys,
                out_keys=tuple(feature.key for feature in io.outputs),
                state_keys=tuple(feature.key for feature in io.state),
                core_state_keys=tuple(feature.key for feature in io.core_state),
                device=config.policy_device,
                random_steps=max(0, self.init_random_frames - self._frames),
            ),
            store=self.weight_store,
            seed=self._seed,
            generation=self._generation,
        )
        engine = ProcessEngine(parts) if config.num_workers else SerialEngine(parts)
        self._engine = engine
        # However the collector goes - collected, forgotten, interpreter exit - the workers end.
        self._finalizer = weakref.finalize(self, engine.stop)
        self._assembler = BatchAssembler(
            self._slab, config.rollouts_per_batch, self.compact_obs, self.pin_memory
        )
        try:
            engine.start()
        except BaseException:
            self.shutdown()
            raise

    def _set_mode(self) -> None:
        """How actions are chosen from now on; a background thread has no context of its own."""
        inside = interaction_type() if self._background is None else None
        self._mode[0] = EXPLORATION.index((inside or self.exploration_type).value)

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """As :meth:`iterator`, or whole trajectories.

        Raises:
            RuntimeError: :meth:`start` fills the replay buffer, and would lose rollouts to this.
        """
        if self._background is not None and not self._background.is_this_thread():
            raise RuntimeError("start() fills the replay buffer already; read from the buffer")
        return super().__iter__()  # type: ignore[no-any-return]

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Yield batches until ``total_frames`` is reached or the collector is shut down.

        None in place of each batch that has gone into the replay buffer.

        Raises:
            RuntimeError: it has been shut down before.
        """
        if self._closed:
            raise RuntimeError("this collector has been shut down; make a new one")
        while self._frames < self.total_frames and not self._closed:
            self._start_workers()
            if self._pre_collect_hook is not None:
                self._pre_collect_hook()
            try:
                batch = self._postprocess(self._collect())
            except CollectionInterrupted:
                return
            if self._post_collect_hook is not None:
                self._post_collect_hook(batch)
            if self._writer is None or self._ignore_rb:
                yield batch
            else:
                self._writer.write(batch)
                yield None

    def _collect(self) -> TensorDict:
        """One batch. Hot path: waits, copies each slot as it comes, hands it back."""
        engine, assembler, k = self._engine, self._assembler, self.config.envs_per_split
        assert engine is not None
        if not self._begun:
            self._begun = True
            engine.begin()
        self._set_mode()
        for slot in self._to_release:  # zero lag: collecting goes on only now
            engine.release(slot)
        self._to_release = []
        while assembler.missing:
            if not self._unread:
                self._unread.append((engine.next_full(), 0))
            slot, first = self._unread.popleft()
            count = min(k - first, assembler.missing)
            episodes = assembler.add(slot, first, count)
            self._episodes.extend(episodes)
            self._num_episodes += len(episodes)
            if first + count < k:
                self._unread.appendleft((slot, first + count))
            elif self.config.async_mode:
                engine.release(slot)
            else:
                self._to_release.append(slot)
        batch = assembler.finish()
        assembler.start()
        self._frames += self.config.frames_per_batch
        self._iter += 1
        return batch

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End every worker process; may be called twice, and before any start.

        Args:
            timeout: seconds to wait for a batch on its way into the replay buffer; None waits.
            close_env: accepted for TorchRL's sake; envs end with their processes.
            raise_on_error: whether an error while ending is raised.
        """
        self._closed = True
        if self._engine is not None:
            self._engine.interrupt()
        if self._background is not None:
            self._background.stop(timeout)
        engine, self._engine = self._engine, None
        self.weight_store.close()
        if engine is None:
            return
        self._finalizer.detach()
        try:
            engine.stop()
        except Exception:
            if raise_on_error:
                raise
        finally:
            self._slab.close()
            for name in ("_assembler", "_slab", "_mode"):  # and with them the memory
                self.__dict__.pop(name, None)

    def is_running(self) -> bool:
        """Whether the replay buffer is being filled in the background."""
        return self._background is not None and self._background.is_running

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Write nothing into the replay buffer inside; waits for the batch on its way."""
        with contextlib.nullcontext() if self._background is None else self._background.paused():
            self._raise_background_error()
            yield

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer.

        Raises:
            WorkerError: collecting in the background has failed.
        """
        self._raise_background_error()
        return getattr(self.replay_buffer, attr)

    def _raise_background_error(self) -> None:
        if self._background is not None and self._background.error is not None:
            raise self._background.error

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed envs and action sampling; before the workers start.

        Args:
            seed: seed of the run; every env derives its own from it.
            static_seed: True returns ``seed`` unchanged.

        Returns:
            A seed for whatever is seeded next.

        Raises:
            RuntimeError: the workers run already.
        """
        if self._engine is not None:
            raise RuntimeError("set_seed must be called before the collector starts its workers")
        self._seed = int(seed)
        return seed if static_seed else seed + 1

    def state_dict(self) -> OrderedDict[str, Any]:
        """Counters and version; envs cannot be saved, so episodes start anew on resume."""
        return OrderedDict(
            frames=self._frames,
            iter=self._iter,
            policy_version=self.policy_version,
            num_episodes=self._num_episodes,
            seed=self._seed,
            generation=self._generation,
            policy_state_dict=self.weight_store.newest(),
        )

    def load_state_dict(self, state_dict: OrderedDict[str, Any]) -> None:
        """Continue the counters of another run, with new episodes.

        Raises:
            RuntimeError: the workers run already.
        """
        if self._engine is not None:
            raise RuntimeError("load_state_dict must be called before the collector starts")
        self._frames = int(state_dict["frames"])
        self._iter = int(state_dict["iter"])
        self._num_episodes = int(state_dict["num_episodes"])
        self._seed = int(state_dict["seed"])
        self._generation = int(state_dict["generation"]) + 1
        weights = state_dict.get("policy_state_dict") or published_module(self.policy)
        self.weight_store.publish(weights, version=int(state_dict["policy_version"]))

    def count_from(self, frames: int) -> None:
        """Take ``frames`` env steps as collected so far; before the workers start.

        Raises:
            RuntimeError: the workers run already.
        """
        if self._engine is not None:
            raise RuntimeError("count_from must be called before the collector starts")
        self._frames = frames

    def stats(self) -> dict[str, int | float | bool | str]:
        """TorchRL's counters, and what the last 100 episodes and the workers are doing.

        Returns:
            TorchRL's entries (``frames``, ``batches``, ...), ``path`` (how envs are stepped:
            ``raw``, ``vectorized`` or ``generic``), ``episodes`` (finished so far),
            ``mean_return`` and ``mean_length`` (env steps) once an episode has finished, and
            ``env_workers_waited_s``, ``inference_waited_s`` (seconds spent waiting so far, the
            former a mean over env workers).
        """
        found: dict[str, int | float | bool | str] = super().stats()
        found["path"] = self.env_specs.path
        found["episodes"] = self._num_episodes
        recent = self.recent_episodes()  # a copy: another thread may be collecting
        if recent:
            count = len(recent)
            found["recent_episodes"] = count
            found["mean_return"] = sum(e.episode_return for e in recent) / count
            found["mean_length"] = sum(e.length for e in recent) / count
        slab = getattr(self, "_slab", None)
        if slab is not None:
            *workers, inference = (slab.numpy(WAITED) / 1e9).tolist()
            found["env_workers_waited_s"] = sum(workers) / len(workers)
            found["inference_waited_s"] = inference
        return found

    def recent_episodes(self) -> tuple[Episode, ...]:
        """The last 100 episodes that ended in batches read so far, oldest first."""
        return tuple(self._episodes)

    def __len__(self) -> int:
        """Batches in ``total_frames``.

        Raises:
            TypeError: the collector has no end.
        """
        if self.total_frames == float("inf"):
            raise TypeError("a collector without total_frames has no length")
        return -(-int(self.total_frames) // self.config.frames_per_batch)
