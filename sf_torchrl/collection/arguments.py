"""TorchRL's constructor arguments: what those that a collector here does not take are answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sf_torchrl.envs.factory import EnvFactory, with_arguments, with_time_limit

_WORKERS_OWN = "workers and inference are processes of the collector's own"

NOT_TAKEN: dict[str, tuple[tuple[Any, ...], str]] = {
    "backend": ((None,), f"{_WORKERS_OWN}; num_workers=0 does everything in this process"),
    "backend_options": ((None,), f"{_WORKERS_OWN}; see num_workers, num_envs_per_worker"),
    "num_collectors": ((None,), "use num_workers"),
    "sync": ((None,), "use async_mode=False for sync=True, async_mode=True for sync=False"),
    "device": ((None, "cpu"), "use policy_device, and storing_device for batches"),
    "env_device": ((None, "cpu"), "env workers step envs on the CPU"),
    "reset_at_each_iter": (
        (False,),
        "episodes run on from batch to batch; limit them with max_frames_per_traj",
    ),
    "return_same_td": ((False,), "every batch is new memory that belongs to the caller"),
    "reset_when_done": ((True,), "envs are always reset when an episode ends"),
    "interruptor": ((None,), "batches are whole; call shutdown() to end collecting"),
    "use_buffers": ((None,), "workers always write into shared memory"),
    "extend_buffer": ((True,), "a replay buffer gets whole batches"),
    "trust_policy": ((None,), "the policy is run once to see what it writes"),
    "compile_policy": ((None, False), "compile inside a policy_factory: torch.compile(policy)"),
    "cudagraph_policy": ((None, False), "record inside a policy_factory"),
    "no_cuda_sync": ((False,), "the inference worker waits for its actions, and nobody else does"),
    "weight_updater": ((None,), "use update_policy_weights_(), or weight_sync_schemes"),
    "weight_recv_schemes": ((None,), "it takes weights from update_policy_weights_() alone"),
    "worker_idx": ((None,), "it is no worker of another collector"),
    "auto_register_policy_transforms": (
        (None, True),
        "is_init and recurrent state always come from the workers",
    ),
}
"""Arguments of TorchRL's ``Collector`` without meaning here: values that ask for nothing else than
is done, and what to use instead of any other."""


def refuse_not_taken(arguments: Mapping[str, Any]) -> None:
    """Answer arguments that are TorchRL's but not ours.

    Raises:
        ValueError: one asks for what is not done.
        TypeError: TorchRL has no such argument either.
    """
    for name, value in arguments.items():
        if name not in NOT_TAKEN:
            raise TypeError(f"SharedMemoryCollector got an unexpected keyword argument {name!r}")
        accepted, advice = NOT_TAKEN[name]
        if value not in accepted and str(value) not in accepted:
            raise ValueError(f"{name}={value!r} is not supported: {advice}")


def env_factories(
    create_env_fn: EnvFactory | Sequence[EnvFactory],
    create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    num_workers: int | None,
    default_num_workers: int,
    max_frames_per_traj: int | None,
) -> tuple[EnvFactory, ...]:
    """One function a worker (one in all without workers), arguments and time limit applied.

    Raises:
        ValueError: a list of another length than there are workers.
    """
    is_list = isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str)
    given: Sequence[EnvFactory] = create_env_fn if is_list else [create_env_fn]  # type: ignore[assignment, list-item]
    if is_list and not given:
        raise ValueError("create_env_fn is an empty list; give one function a worker")
    if num_workers is None:
        num_workers = len(given) if is_list else default_num_workers
    count = max(num_workers, 1)
    if is_list and len(given) != count:
        raise ValueError(
            f"create_env_fn has {len(given)} functions for num_workers={num_workers}; give one a "
            "worker"
        )
    if isinstance(create_env_kwargs, Sequence):
        kwargs = list(create_env_kwargs)
        if len(kwargs) != count:
            raise ValueError(
                f"create_env_kwargs has {len(kwargs)} entries for num_workers={num_workers}; give "
                "one a worker, or one dict for all"
            )
    else:
        kwargs = [create_env_kwargs or {}] * count
    if max_frames_per_traj is not None and max_frames_per_traj < 1:
        raise ValueError(f"max_frames_per_traj={max_frames_per_traj} must be at least 1")
    made: dict[tuple[int, int], EnvFactory] = {}  # equal ones stay one object: tried out once
    found = []
    for index in range(count):
        function = given[index] if is_list else given[0]
        key = (id(function), id(kwargs[index]))
        if key not in made:
            made[key] = with_time_limit(
                with_arguments(function, kwargs[index]), max_frames_per_traj
            )
        found.append(made[key])
    return tuple(found)
