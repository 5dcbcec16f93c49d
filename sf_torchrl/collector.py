"""The collector: starts the workers and yields batches of rollouts.

 main process                            env worker w (no torch)           inference worker
 ------------                            -----------------------           ----------------
 learner                                 split 0 | split 1 | ...           take all waiting requests
   optimizer step                          step the split's k envs         pull weights if newer
   WeightStore.publish  --- version -->    write into the slab   request   one forward pass
 next(collector)                           ask for actions ------------->  write actions, version
   wait for full slots  <--- slot ----     rollout full: say so  <-------  wake each split served
   copy into the batch
   hand the slot back   ---- slot --->     go on in it

Tensors are written once, where they will be read; only small integers travel.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn
from torchrl.collectors import BaseCollector

from sf_torchrl.config import CollectorConfig
from sf_torchrl.envs.factory import EnvFactory, try_out
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.memory.batch import BatchAssembler, Episode
from sf_torchrl.memory.slab import WAITED, Slab, SlabLayout
from sf_torchrl.memory.weights import Weights, WeightStore
from sf_torchrl.models.policy_io import (
    PolicyIO,
    RandomPolicy,
    as_row_policy,
    read_policy_io,
)
from sf_torchrl.workers.engines import Engine, EngineParts, ProcessEngine, SerialEngine
from sf_torchrl.workers.supervisor import check_picklable

RETURN_WINDOW = 100
"""Episodes over which mean return and length are reported; Sample Factory's stats_avg."""


class SharedMemoryCollector(BaseCollector):
    """Batches of rollouts from env worker processes and a batched inference worker.

    Yields ``TensorDict`` batches ``[B, T]``, last dimension named "time", contiguous and owned by
    the caller, with TorchRL's keys: the env's observations (``observation``, or the keys of a
    ``Dict`` space), ``action`` and every other out-key of the policy, ``policy_version`` (int64
    ``[B, T]``, never newer than the weights that chose the action), ``done``, ``terminated``,
    ``truncated``, ``("collector", "traj_ids")`` and ``("next", ...)`` with the true next
    observation (before any reset), ``reward``, ``done``, ``terminated`` and ``truncated``.

    Nothing is started before the first batch is asked for or :meth:`start` is called.

    Args:
        create_env_fn: a gymnasium env id, or a callable that makes one gymnasium env a call.
        policy: TensorDict module that reads observations and writes ``action``; None takes random
            actions. Workers run a copy of it, which :meth:`update_policy_weights_` renews.

    Keyword Args:
        frames_per_batch: env steps in one batch; a multiple of ``rollout_length``.
        total_frames: env steps after which the iterator ends; -1 never ends.
        num_workers: env processes; 0 does everything in the main process, reproducibly.
        num_envs_per_worker: envs stepped in series by one worker.
        num_splits: groups of envs per worker; 2 is double buffering.
        rollout_length: env steps in one rollout, ``T``.
        max_batches_in_flight: batches being collected or unread before workers pause.
        async_mode: collect while the learner learns; False waits until the next batch is asked
            for, so that every step's ``policy_version`` is the newest published.
        seed: seed of envs and action sampling; None takes torch's, as ``torch.manual_seed`` or
            ``seed_everything`` set it. Every env gets its own.
        exploration_type: whether the policy samples (``RANDOM``, default) or takes the mode.
        env_start_timeout_s: seconds within which the first rollouts must have come.
        inference_threads: threads of the inference worker.
        pre_collect_hook: called before each batch is collected.
        post_collect_hook: called with each batch before it is yielded.

    Raises:
        ValueError: sizes that do not fit together, an unknown env id, an unsupported space, an
            env that breaks gymnasium's contract, a policy that does not fit the env. All before
            any process starts.
        WorkerError: while iterating: a worker process failed; has its traceback.
    """

    def __init__(  # noqa: PLR0913 (TorchRL's convention)
        self,
        create_env_fn: EnvFactory,
        policy: nn.Module | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        num_workers: int = CollectorConfig.num_workers,
        num_envs_per_worker: int = CollectorConfig.num_envs_per_worker,
        num_splits: int = CollectorConfig.num_splits,
        rollout_length: int = CollectorConfig.rollout_length,
        max_batches_in_flight: int = CollectorConfig.max_batches_in_flight,
        async_mode: bool = CollectorConfig.async_mode,
        seed: int | None = None,
        exploration_type: InteractionType = InteractionType.RANDOM,
        env_start_timeout_s: float = CollectorConfig.env_start_timeout_s,
        inference_threads: int = CollectorConfig.inference_threads,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
    ) -> None:
        super().__init__(pre_collect_hook=pre_collect_hook, post_collect_hook=post_collect_hook)
        self.config = CollectorConfig(
            frames_per_batch=frames_per_batch,
            num_workers=num_workers,
            num_envs_per_worker=num_envs_per_worker,
            num_splits=num_splits,
            rollout_length=rollout_length,
            max_batches_in_flight=max_batches_in_flight,
            async_mode=async_mode,
            env_start_timeout_s=env_start_timeout_s,
            inference_threads=inference_threads,
        )
        if total_frames == 0 or total_frames < -1:
            raise ValueError(f"total_frames={total_frames} must be positive, or -1 for no end")
        self.total_frames: int | float = total_frames if total_frames > 0 else float("inf")
        self.create_env_fn = create_env_fn
        self.env_specs: EnvSpecs = try_out(create_env_fn)
        self.policy: nn.Module = RandomPolicy(self.env_specs.action) if policy is None else policy
        self._io: PolicyIO = read_policy_io(self.policy, self.env_specs)
        if num_workers:
            check_picklable("create_env_fn", create_env_fn)
            check_picklable("policy", self.policy)
        self.weight_store = WeightStore(self.policy)
        self.exploration_type = exploration_type
        self._seed = torch.initial_seed() if seed is None else int(seed)
        self._generation = 0
        self._frames = 0
        self._iter = -1
        self._episodes: deque[Episode] = deque(maxlen=RETURN_WINDOW)
        self._num_episodes = 0
        self._engine: Engine | None = None
        self._closed = self._begun = False
        self._unread: deque[tuple[int, int]] = deque()  # (slot, first rollout not yet copied)
        self._to_release: list[int] = []
        # Read by TorchRL's Trainer and stats.
        self.init_random_frames = 0
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch

    def start(self) -> None:
        """Start the workers without waiting for them; the first batch does it otherwise.

        Raises:
            RuntimeError: the collector has been shut down.
        """
        if self._engine is not None:
            return
        if self._closed:
            raise RuntimeError("this collector has been shut down; make a new one")
        config = self.config
        self._slab = Slab(
            SlabLayout(
                num_workers=max(config.num_workers, 1),
                num_slots=config.num_slots,
                envs_per_slot=config.envs_per_split,
                rollout_length=config.rollout_length,
                observation=self.env_specs.observation,
                policy=self._io.outputs,
            )
        )
        parts = EngineParts(
            config=config,
            create_env_fn=self.create_env_fn,
            specs=self.env_specs,
            slab=self._slab,
            policy=as_row_policy(copy.deepcopy(self.policy).cpu(), self._io, self.exploration_type),
            store=self.weight_store,
            in_keys=self._io.in_keys,
            out_keys=tuple(feature.key for feature in self._io.outputs),
            seed=self._seed,
            generation=self._generation,
        )
        engine = ProcessEngine(parts) if config.num_workers else SerialEngine(parts)
        self._engine = engine
        # However the collector goes - collected, forgotten, interpreter exit - the workers end.
        self._finalizer = weakref.finalize(self, engine.stop)
        self._assembler = BatchAssembler(self._slab, config.rollouts_per_batch)
        try:
            engine.start()
        except BaseException:
            self.shutdown()
            raise

    def iterator(self) -> Iterator[TensorDict]:
        """Yield batches until ``total_frames`` is reached or the collector is shut down.

        Raises:
            RuntimeError: it has been shut down before.
        """
        if self._closed:
            raise RuntimeError("this collector has been shut down; make a new one")
        while self._frames < self.total_frames and not self._closed:
            self.start()
            if self._pre_collect_hook is not None:
                self._pre_collect_hook()
            batch = self._collect()
            if self._post_collect_hook is not None:
                self._post_collect_hook(batch)
            yield batch

    def _collect(self) -> TensorDict:
        """One batch. Hot path: waits, copies each slot as it comes, hands it back."""
        engine, assembler, k = self._engine, self._assembler, self.config.envs_per_split
        assert engine is not None
        if not self._begun:
            self._begun = True
            engine.begin()
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
        self._frames += self.frames_per_batch
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
            timeout: accepted for TorchRL's sake; ending takes two seconds at the most.
            close_env: accepted for TorchRL's sake; envs end with their processes.
            raise_on_error: whether an error while ending is raised.
        """
        self._closed = True
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
            del self._assembler, self._slab  # and with them the memory

    @property
    def policy_version(self) -> int:
        """Version of the newest weights published, in calls of update_policy_weights_."""
        return self.weight_store.version

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights_dict: dict[str, Weights] | None = None,
        **kwargs: Any,
    ) -> None:
        """Publish weights as the next version.

        Args:
            policy_or_weights: module, TensorDict or state dict; None takes the policy given at
                construction.
            weights_dict: ``{"policy": weights}``, as TorchRL's trainers may give it.
            **kwargs: TorchRL's other ways to say the same.

        Raises:
            ValueError: names or shapes that are not the policy's, or a model other than "policy".
        """
        if weights_dict is not None:
            if set(weights_dict) != {"policy"} or policy_or_weights is not None:
                raise ValueError(
                    f"there is one model, 'policy', to update; got {sorted(weights_dict)}"
                )
            policy_or_weights = weights_dict["policy"]
        super().update_policy_weights_(policy_or_weights, **kwargs)

    def _maybe_fallback_update(
        self,
        policy_or_weights: Weights | None = None,
        *,
        model_id: str | None = None,
    ) -> None:
        """Publish weights (those of the policy given at construction when None)."""
        self.weight_store.publish(self.policy if policy_or_weights is None else policy_or_weights)

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
        self.weight_store.publish(self.policy, version=int(state_dict["policy_version"]))

    def count_from(self, frames: int) -> None:
        """Take ``frames`` env steps as collected so far; before the workers start.

        Raises:
            RuntimeError: the workers run already.
        """
        if self._engine is not None:
            raise RuntimeError("count_from must be called before the collector starts")
        self._frames = frames

    def stats(self) -> dict[str, int | float | bool]:
        """TorchRL's counters, and what the last 100 episodes and the workers are doing.

        Returns:
            TorchRL's entries (``frames``, ``batches``, ...), ``episodes`` (finished so far),
            ``mean_return`` and ``mean_length`` (env steps) once an episode has finished, and
            ``env_workers_waited_s``, ``inference_waited_s`` (seconds spent waiting so far, the
            former a mean over env workers).
        """
        found: dict[str, int | float | bool] = super().stats()
        found["episodes"] = self._num_episodes
        if self._episodes:
            count = len(self._episodes)
            found["recent_episodes"] = count
            found["mean_return"] = sum(e.episode_return for e in self._episodes) / count
            found["mean_length"] = sum(e.length for e in self._episodes) / count
        if self._engine is not None:
            *workers, inference = (self._slab.numpy(WAITED) / 1e9).tolist()
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
        return -(-int(self.total_frames) // self.frames_per_batch)
