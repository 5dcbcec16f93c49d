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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.weight_update import WeightSyncScheme

from sf_torchrl.collection.arguments import env_factories, refuse_not_taken
from sf_torchrl.collection.postprocess import PostProcessor
from sf_torchrl.collection.replay import BufferWriter
from sf_torchrl.collection.running import RunningCollector
from sf_torchrl.config import CollectorConfig
from sf_torchrl.envs.factory import EnvFactory
from sf_torchrl.envs.spaces import EnvSpecs
from sf_torchrl.envs.try_out import try_out_all
from sf_torchrl.memory.weights import WeightStore
from sf_torchrl.models.given_policy import (
    Policy,
    RandomPolicy,
    as_tensordict_policy,
    published_module,
)
from sf_torchrl.models.policy_io import MadeInWorker, PolicyIO, as_row_policy, read_policy_io
from sf_torchrl.models.row_policy import Given, RowPolicy
from sf_torchrl.workers.staging import check_device
from sf_torchrl.workers.supervisor import check_picklable

RETURN_WINDOW = 100
"""Episodes over which mean return and length are reported; Sample Factory's stats_avg."""


class SharedMemoryCollector(RunningCollector):
    """Batches of rollouts from env worker processes and a batched inference worker.

    Yields ``TensorDict`` batches ``[B, T]``, last dimension named "time", contiguous and owned by
    the caller, with TorchRL's keys: the env's observations (``observation``, or the keys of a
    ``Dict`` space or a TorchRL env), the action and every other out-key of the policy,
    ``policy_version`` (int64 ``[B, T]``, never newer than the weights that chose the action),
    ``is_init`` (bool), ``step_count`` (int64) and ``episode_reward`` (float32), each ``[B, T, 1]``
    and as TorchRL's InitTracker, StepCounter and RewardSum write them, ``done``, ``terminated``,
    ``truncated``, ``("collector", "traj_ids")`` (int64 ``[B, T]``, unique over workers and
    episodes), and ``("next", ...)`` with the true next observation (before any reset), ``reward``,
    ``done``, ``terminated`` and ``truncated``.

    Nothing is started before the first batch is asked for or :meth:`start` is called.

    Args:
        create_env_fn: a gymnasium env id, ``module:function``, or a callable that makes one env a
            call: gymnasium's ``Env`` (the fastest), a ``VectorEnv`` or EnvPool, or any TorchRL
            env. A list has one a worker.
        policy: TensorDict module that reads observations and writes the action; a module or
            function of observations, or of a TensorDict, is wrapped. None takes random actions.
            Workers run a copy, which :meth:`update_policy_weights_` renews.

    Keyword Args:
        policy_factory: makes the policy, for one that cannot be pickled; instead of ``policy``.
        frames_per_batch: env steps in one batch; a multiple of ``rollout_length``.
        total_frames: env steps after which the iterator ends; -1 never ends.
        num_workers: env processes; 0 does everything in the main process, reproducibly. None: one
            a function of ``create_env_fn``, or 2.
        num_envs_per_worker: envs stepped by one worker. None: 8, or where an env object steps
            several, one object a split.
        num_splits: groups of envs per worker; 2 is double buffering.
        rollout_length: env steps in one rollout, ``T``.
        max_batches_in_flight: batches being collected or unread before workers pause.
        async_mode: collect while the learner learns; False waits until the next batch is asked
            for, so that every step's ``policy_version`` is the newest published.
        seed: seed of envs and action sampling; None takes torch's, as ``torch.manual_seed`` or
            ``seed_everything`` set it. Every env gets its own.
        exploration_type: whether the policy samples (``RANDOM``, default) or takes the mode. Inside
            ``set_exploration_type`` that type holds for what is collected from then on.
        env_start_timeout_s: seconds within which the first rollouts must have come.
        policy_device: device of the inference worker: ``cpu`` (default) or a GPU.
        inference_threads: threads of the inference worker; 0 takes a quarter of the cores that env
            workers leave.
        create_env_kwargs: keyword arguments of ``create_env_fn``; a list has one dict a worker.
        max_frames_per_traj: env steps after which an episode is truncated.
        init_random_frames: env steps with random actions at first; policy outputs other than the
            action are as if it had acted.
        postproc: called on each batch; what it returns is handed over.
        split_trajs: hand over one trajectory a row, zero-padded, with ``("collector", "mask")``.
        track_traj_ids: False leaves ``("collector", "traj_ids")`` out.
        track_policy_version: False leaves ``policy_version`` out.
        set_truncated: mark the last step of every rollout as truncated.
        storing_device: where batches are handed over.
        replay_buffer: batches are written into it and None is yielded. A storage of one dimension
            gets steps, of two rollouts.
        compact_obs: leave out what ``("next", ...)`` repeats of the observations.
        weight_sync_schemes: ``{"policy": scheme}``; accepted, though weights always go through
            shared memory.
        trajs_per_batch: yield batches of so many complete trajectories instead, or write complete
            trajectories into the replay buffer.
        trajs_per_write: complete trajectories in one write into the replay buffer.
        traj_format: "padded" or "cat", the layout of those batches.
        pre_collect_hook: called before each batch is collected.
        post_collect_hook: called with each batch before it is handed over.
        **torchrl_arguments: TorchRL's others, where they ask for what is done anyway.

    Raises:
        ValueError: sizes that do not fit together, an unknown env id, an unsupported space, an
            env that breaks its contract, envs that differ between workers, a policy that does not
            fit the env, a replay buffer that does not fit the batch, an argument of TorchRL's that
            has no meaning here. All before any process starts.
        WorkerError: while iterating: a worker process failed; has its traceback.
    """

    def __init__(  # noqa: PLR0913 (TorchRL's convention)
        self,
        create_env_fn: EnvFactory | Sequence[EnvFactory],
        policy: Policy | None = None,
        *,
        policy_factory: Callable[[], Policy] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        num_workers: int | None = None,
        num_envs_per_worker: int | None = None,
        num_splits: int = CollectorConfig.num_splits,
        rollout_length: int = CollectorConfig.rollout_length,
        max_batches_in_flight: int = CollectorConfig.max_batches_in_flight,
        async_mode: bool = CollectorConfig.async_mode,
        seed: int | None = None,
        exploration_type: InteractionType = InteractionType.RANDOM,
        env_start_timeout_s: float = CollectorConfig.env_start_timeout_s,
        policy_device: torch.device | str | int | None = None,
        inference_threads: int = CollectorConfig.inference_threads,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        split_trajs: bool | None = None,
        track_traj_ids: bool = True,
        track_policy_version: bool = True,
        set_truncated: bool = False,
        storing_device: torch.device | str | int | None = None,
        replay_buffer: ReplayBuffer | None = None,
        compact_obs: bool = False,
        weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: Literal["padded", "cat"] | None = None,
        pre_collect_hook: Callable[[], None] | None = None,
        post_collect_hook: Callable[[TensorDictBase], None] | None = None,
        **torchrl_arguments: Any,
    ) -> None:
        refuse_not_taken(torchrl_arguments)
        super().__init__(pre_collect_hook, post_collect_hook)
        self._set_schemes(weight_sync_schemes)
        self.create_env_fn = create_env_fn
        self._factories = env_factories(
            create_env_fn,
            create_env_kwargs,
            num_workers,
            CollectorConfig.num_workers,
            max_frames_per_traj,
        )
        sizes = CollectorConfig(
            frames_per_batch=frames_per_batch,
            num_workers=len(self._factories) if num_workers is None else num_workers,
            num_envs_per_worker=num_splits if num_envs_per_worker is None else num_envs_per_worker,
            num_splits=num_splits,
            rollout_length=rollout_length,
            max_batches_in_flight=max_batches_in_flight,
            env_start_timeout_s=env_start_timeout_s,
            inference_threads=inference_threads,
            policy_device=str(check_device("policy_device", policy_device)),
        )
        if total_frames == 0 or total_frames < -1:
            raise ValueError(f"total_frames={total_frames} must be positive, or -1 for no end")
        if (init_random_frames or 0) < 0:
            raise ValueError(f"init_random_frames={init_random_frames} must not be negative")
        if not isinstance(exploration_type, InteractionType):
            raise ValueError(
                f"exploration_type={exploration_type!r} must be an ExplorationType of TorchRL's"
            )
        if not isinstance(track_policy_version, bool):
            raise ValueError(
                f"track_policy_version={track_policy_version!r} must be True or False: versions "
                "are those of update_policy_weights_()"
            )
        if split_trajs and not track_traj_ids:
            raise ValueError("split_trajs needs track_traj_ids")
        self.total_frames: int | float = total_frames if total_frames > 0 else float("inf")
        self._set_policy(policy, policy_factory, try_out_all(self._factories))
        count = (
            self._default_num_envs(num_splits)
            if num_envs_per_worker is None
            else num_envs_per_worker
        )
        self.config = replace(sizes, num_envs_per_worker=count, async_mode=async_mode)
        self._check_envs_at_once()
        if self.config.num_workers:
            for factory in {id(factory): factory for factory in self._factories}.values():
                check_picklable("create_env_fn", factory)
            check_picklable("policy", self._make_row_policy())
        self.weight_store = WeightStore(published_module(self.policy))
        self.exploration_type = exploration_type
        self.compact_obs = compact_obs
        self._seed = torch.initial_seed() if seed is None else int(seed)
        # Read by TorchRL's Trainer and stats.
        self.init_random_frames = init_random_frames or 0
        self.requested_frames_per_batch = self.frames_per_batch = frames_per_batch
        self._postprocess = PostProcessor(
            track_traj_ids=track_traj_ids,
            track_policy_version=track_policy_version,
            set_truncated=set_truncated,
            split_trajs=bool(split_trajs),
            postproc=postproc,
            storing_device=None if storing_device is None else torch.device(storing_device),
            num_envs=self.config.num_envs,
        )
        self._set_destination(replay_buffer, trajs_per_batch, trajs_per_write, traj_format)

    def _set_policy(
        self,
        policy: Policy | None,
        factory: Callable[[], Policy] | None,
        specs: EnvSpecs,
    ) -> None:
        if policy is not None and factory is not None:
            raise ValueError("both policy and policy_factory are given; give one of them")
        given = policy if factory is None else factory()
        self.policy: nn.Module = (
            RandomPolicy(specs) if given is None else as_tensordict_policy(given, specs)
        )
        self._policy_factory, self._all_specs = factory, specs
        self._io: PolicyIO = read_policy_io(self.policy, specs, may_copy=factory is None)
        state = {feature.key for feature in (*self._io.state, *self._io.core_state)}
        self.env_specs: EnvSpecs = replace(
            specs, observation=tuple(f for f in specs.observation if f.key not in state)
        )

    def _make_row_policy(self) -> Callable[[], RowPolicy]:
        if self._policy_factory is not None:
            return MadeInWorker(self._policy_factory, self._all_specs, self._io)
        return Given(as_row_policy(copy.deepcopy(self.policy).cpu(), self._io))

    def _default_num_envs(self, num_splits: int) -> int:
        at_once = self.env_specs.envs_at_once
        return at_once * num_splits if at_once > 1 else CollectorConfig.num_envs_per_worker

    def _check_envs_at_once(self) -> None:
        at_once, config = self.env_specs.envs_at_once, self.config
        if config.envs_per_split % at_once:
            raise ValueError(
                f"env {self.env_specs.name!r} steps {at_once} envs at once: num_envs_per_worker="
                f"{config.num_envs_per_worker} over num_splits={config.num_splits} must be a "
                f"multiple of {at_once} a split, e.g. {at_once * config.num_splits}"
            )

    def _check_trajectories(
        self,
        replay_buffer: ReplayBuffer | None,
        trajs_per_batch: int | None,
        trajs_per_write: int | None,
        traj_format: str | None,
    ) -> None:
        process = self._postprocess
        if replay_buffer is None and trajs_per_write is not None:
            raise ValueError(f"trajs_per_write={trajs_per_write} needs a replay_buffer")
        if replay_buffer is not None and traj_format is not None:
            raise ValueError(
                f"traj_format={traj_format!r}: a replay_buffer gets trajectories as rows of steps"
            )
        if trajs_per_write is not None and trajs_per_write < 1:
            raise ValueError(f"trajs_per_write={trajs_per_write} must be at least 1")
        if trajs_per_batch is None and (trajs_per_write, traj_format) != (None, None):
            raise ValueError("trajs_per_write and traj_format need trajs_per_batch")
        if trajs_per_batch is not None:
            if trajs_per_batch < 1:
                raise ValueError(f"trajs_per_batch={trajs_per_batch} must be at least 1")
            if traj_format not in (None, "padded", "cat"):
                raise ValueError(f"traj_format={traj_format!r} must be 'padded' or 'cat'")
            if not process.track_traj_ids or process.split_trajs or process.set_truncated:
                raise ValueError(
                    "trajs_per_batch needs track_traj_ids, and neither split_trajs nor "
                    "set_truncated"
                )

    def _set_destination(
        self,
        replay_buffer: ReplayBuffer | None,
        trajs_per_batch: int | None,
        trajs_per_write: int | None,
        traj_format: Literal["padded", "cat"] | None,
    ) -> None:
        """Where batches go, and whether they are made of whole trajectories: TorchRL does that."""
        process = self._postprocess
        self._check_trajectories(replay_buffer, trajs_per_batch, trajs_per_write, traj_format)
        self.trajs_per_batch, self.trajs_per_write = trajs_per_batch, trajs_per_write
        self.traj_format = traj_format or "padded"
        self.replay_buffer = replay_buffer
        self._writer = None
        if replay_buffer is not None:
            if process.split_trajs:
                raise ValueError("split_trajs cannot be written into a replay_buffer")
            example = replace(process, postproc=None)(self._empty_batch())
            self._writer = BufferWriter(
                replay_buffer,
                example,
                whole_batches=trajs_per_batch is None,
                known=process.postproc is None,
            )
