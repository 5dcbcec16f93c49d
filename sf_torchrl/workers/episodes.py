"""One env and one agent, one whole episode at a time: garage's ``DefaultWorker``.

Free of torch at import: torch comes with the agent, if at all.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import gymnasium
import numpy as np

from sf_torchrl.env_updates import EnvUpdate
from sf_torchrl.envs.spaces import number
from sf_torchrl.memory.episodes import EpisodeBatch, StepType, info_column, stack_steps


class DefaultWorker:
    """Steps one env with one agent; may be subclassed.

    Args:
        seed: of this worker; None leaves random numbers as they are.
        max_episode_length: steps after which an episode is cut off.
        worker_number: from 0, in the order of the results of exact sampling.
    """

    def __init__(self, *, seed: int | None, max_episode_length: int, worker_number: int) -> None:
        self.agent: Any = None
        self.env: Any = None
        self._seed = seed
        self._max_episode_length = max_episode_length
        self._worker_number = worker_number
        self._is_fresh = True  # the env has not been reset yet: its first reset is seeded
        self._num_envs = 0
        self._torch_is_seeded = False
        self.worker_init()

    def worker_init(self) -> None:
        """Seed this process."""
        if self._seed is not None:
            random.seed(self._seed)
            np.random.seed(self._seed)

    def update_agent(self, update: Any) -> None:
        """New parameters (a dict, tuple or array), a new agent, or None, which changes nothing.

        Raises:
            TypeError: parameters for an agent that takes none.
        """
        if update is None:
            return
        if not isinstance(update, dict | tuple | np.ndarray):
            self.agent = update
            self._seed_torch()
            return
        setter = getattr(self.agent, "set_param_values", None)
        if setter is None and isinstance(update, dict):
            setter = getattr(self.agent, "load_state_dict", None)
        if setter is None:
            raise TypeError(
                f"agent_update is a {type(update).__name__}, and {type(self.agent).__name__} has "
                "no set_param_values() or load_state_dict(); give a whole agent"
            )
        setter(update)

    def _seed_torch(self) -> None:
        """Once: an agent that is replaced at every call must not draw the same numbers in each."""
        torch = sys.modules.get("torch")
        if torch is not None and self._seed is not None and not self._torch_is_seeded:
            torch.manual_seed(self._seed)
            self._torch_is_seeded = True

    def update_env(self, update: Any) -> None:
        """What an ``EnvUpdate`` makes of the env, another env, or None, which changes nothing.

        Raises:
            TypeError: anything else.
        """
        if update is None:
            return
        before = self.env
        if isinstance(update, EnvUpdate):
            self.env = update(before)
        elif isinstance(update, gymnasium.Env):
            if before is not None:
                before.close()
            self.env = update
        else:
            raise TypeError(f"env_update {update!r} is neither an env nor an EnvUpdate")
        if before is None or self.env.unwrapped is not before.unwrapped:
            self._is_fresh = True

    def _env_seed(self) -> int | None:
        """For an env's first reset: the worker's seed; for each later env another made from it."""
        self._num_envs += 1
        if self._seed is None or self._num_envs == 1:
            return self._seed
        return int(np.random.SeedSequence((self._seed, self._num_envs)).generate_state(1)[0])

    def start_episode(self) -> None:
        """Reset the env and the agent."""
        seed = self._env_seed() if self._is_fresh else None
        self._is_fresh = False
        self._observation, _ = self.env.reset(seed=seed)
        if hasattr(self.agent, "reset"):
            self.agent.reset()
        self._steps: list[tuple[Any, Any, float, StepType]] = []
        self._env_infos: dict[str, list[Any]] = {}
        self._agent_infos: dict[str, list[Any]] = {}

    def step_episode(self) -> bool:
        """One step; True when the episode is over."""
        seen = _copied(self._observation)
        action, told = choose(self.agent, seen)
        chosen = np.array(action)  # before the step: the env may write into what it is given
        if is_module(self.agent):
            action = _for_env(self.env.action_space, chosen)
        self._observation, reward, terminated, truncated, info = self.env.step(action)
        count = len(self._steps) + 1
        if terminated:
            kind = StepType.TERMINAL
        elif truncated or count >= self._max_episode_length:
            kind = StepType.TIMEOUT
        else:
            kind = StepType.FIRST if count == 1 else StepType.MID
        self._steps.append((seen, chosen, number(reward), kind))
        _note(self._env_infos, info, count)
        _note(self._agent_infos, told, count)
        return kind in (StepType.TERMINAL, StepType.TIMEOUT)

    def collect_episode(self) -> EpisodeBatch:
        """The episode that is over; infos that were not told in every step are left out."""
        observations, actions, rewards, kinds = zip(*self._steps, strict=True)
        last = stack_steps([_copied(self._observation)])
        return EpisodeBatch(
            observations=stack_steps(observations),
            last_observations=last,
            actions=np.stack(actions),
            rewards=np.array(rewards),
            env_infos=_columns(self._env_infos, len(actions)),
            agent_infos=_columns(self._agent_infos, len(actions)),
            step_types=np.array(kinds, np.uint8),
            lengths=np.array([len(actions)], np.int64),
        )

    def rollout(self) -> EpisodeBatch:
        """One whole episode."""
        self.start_episode()
        while not self.step_episode():
            pass
        return self.collect_episode()

    def shutdown(self) -> None:
        """Close the env."""
        if self.env is not None:
            self.env.close()


class WorkerFactory:
    """How a sampler's workers are made.

    Args:
        max_episode_length: steps after which an episode is cut off.
        seed: worker ``i`` gets ``seed + i``; None seeds nothing.
        n_workers: processes; the machine's cores by default.
        worker_class: :class:`DefaultWorker`, or a subclass of it.
        worker_args: further keyword arguments of the class.

    Raises:
        ValueError: a number that is not positive, or a seed that NumPy does not take.
    """

    def __init__(
        self,
        *,
        max_episode_length: int,
        seed: int | None = None,
        n_workers: int | None = None,
        worker_class: type[DefaultWorker] = DefaultWorker,
        worker_args: dict[str, Any] | None = None,
    ) -> None:
        count = (os.cpu_count() or 1) if n_workers is None else n_workers
        sizes: dict[str, Any] = {"max_episode_length": max_episode_length, "n_workers": count}
        for name, value in sizes.items():
            if not isinstance(value, Integral) or value < 1:
                raise ValueError(f"{name}={value!r} must be an integer of at least 1")
        if seed is not None and not 0 <= seed <= 2**32 - count:
            raise ValueError(f"seed={seed} must be in 0 .. {2**32 - count}, or None")
        self.max_episode_length = max_episode_length
        self.seed = seed
        self.n_workers = count
        self.worker_class = worker_class
        self.worker_args = dict(worker_args or {})

    def prepare_worker_messages(
        self, objects: Any, preprocess: Callable[[Any], Any] = lambda value: value
    ) -> list[Any]:
        """One object for each worker: the same for all, or a list's.

        Raises:
            ValueError: a list of another length.
        """
        if not isinstance(objects, list):
            return [preprocess(objects)] * self.n_workers
        if len(objects) != self.n_workers:
            raise ValueError(
                f"Length of list doesn't match number of workers: {len(objects)} for "
                f"n_workers={self.n_workers}"
            )
        return [preprocess(value) for value in objects]

    def __call__(self, worker_number: int) -> DefaultWorker:
        """Make a worker, in its process.

        Raises:
            ValueError: there is no worker of that number.
        """
        if not 0 <= worker_number < self.n_workers:
            raise ValueError(f"worker_number={worker_number} must be below {self.n_workers}")
        return self.worker_class(
            worker_number=worker_number,
            max_episode_length=self.max_episode_length,
            seed=None if self.seed is None else self.seed + worker_number,
            **self.worker_args,
        )


def checked_agent(agent: Any) -> Any:
    """An agent given at construction.

    Raises:
        TypeError: nothing that chooses actions.
    """
    if hasattr(agent, "get_action") or callable(agent):
        return agent
    raise TypeError(
        f"agents has {agent!r}; it must have get_action(observation), be a TensorDict module or a "
        "function from observation to action, or a list of them with one for each worker"
    )


def is_module(agent: Any) -> bool:
    """It is a TensorDict module."""
    return hasattr(agent, "in_keys") and hasattr(agent, "out_keys")


def _for_env(space: gymnasium.Space[Any], action: Any) -> Any:
    """A module's action as the collector gives it to envs: counted from ``start``, clipped."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(action) + int(space.start)
    if isinstance(space, gymnasium.spaces.Box):
        return np.clip(action, space.low, space.high).astype(space.dtype)
    return action.copy()


def choose(agent: Any, observation: Any) -> tuple[Any, Mapping[str, Any]]:
    """Action and infos of an agent: garage's, a TensorDict module, or a function."""
    if hasattr(agent, "get_action"):
        action, told = agent.get_action(observation)
        return action, told
    if is_module(agent):
        return _ask_module(agent, observation)
    return agent(observation), {}


def _ask_module(agent: Any, observation: Any) -> tuple[Any, Mapping[str, Any]]:
    import torch
    from tensordict import TensorDict

    parts = observation if isinstance(observation, dict) else {"observation": observation}
    rows = TensorDict({}, batch_size=[1])
    for name, value in parts.items():
        rows.set(name, torch.as_tensor(np.asarray(value))[None])
    with torch.no_grad():
        answer = agent(rows)[0]
    told = {key: answer.get(key).numpy() for key in agent.out_keys if isinstance(key, str)}
    return told.pop("action"), told


def _copied(observation: Any) -> Any:
    """The env may reuse its buffer."""
    if isinstance(observation, dict):
        return {name: _copied(value) for name, value in observation.items()}
    return np.array(observation)


def _note(columns: dict[str, list[Any]], told: Mapping[str, Any], count: int) -> None:
    for name, value in told.items():
        column = columns.setdefault(name, [])
        if len(column) == count - 1:
            column.append(np.array(value) if isinstance(value, np.ndarray) else value)


def _columns(columns: dict[str, list[Any]], count: int) -> dict[str, Any]:
    return {name: info_column(found) for name, found in columns.items() if len(found) == count}
