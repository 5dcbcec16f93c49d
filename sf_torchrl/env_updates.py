"""What a sampler may do to its workers' envs before it collects: garage's ``EnvUpdate`` family.

An update is called in the worker process, with the env that the worker has, and returns the env
that it shall have. Free of torch: episode workers use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium

from sf_torchrl.envs.factory import EnvFactory, env_name, gymnasium_env, make_env

AnyEnv = gymnasium.Env[Any, Any]


class EnvUpdate:
    """A function from a worker's env to the env it shall have; to be subclassed.

    It is sent to the worker by cloudpickle, so that it may hold lambdas and local functions.
    """

    def __call__(self, old_env: AnyEnv | None = None) -> AnyEnv:
        """Return the env to step from now on; close the old one unless it is kept or wrapped.

        Args:
            old_env: the worker's env; None where it has none yet.
        """
        raise NotImplementedError(f"{type(self).__name__} must define __call__(old_env)")


class NewEnvUpdate(EnvUpdate):
    """Close the worker's env and make a new one.

    Args:
        env_constructor: makes one env a call, or is the id of one.

    Raises:
        TypeError: it is neither a callable nor a string.
    """

    def __init__(self, env_constructor: EnvFactory) -> None:
        if not (callable(env_constructor) or isinstance(env_constructor, str)):
            raise TypeError(
                f"NewEnvUpdate got {env_constructor!r}; give it an env id or a callable that makes "
                "one env, or use ExistingEnvUpdate for an env"
            )
        self._env_constructor = env_constructor

    def __call__(self, old_env: AnyEnv | None = None) -> AnyEnv:
        """The new env."""
        if old_env is not None:
            old_env.close()
        env: AnyEnv = gymnasium_env(make_env(self._env_constructor))
        return env


class SetTaskUpdate(EnvUpdate):
    """Give the worker's env a new task; make a new env where it is of another type.

    Args:
        env_type: class of the env, which has a method ``set_task(task)``. The worker's unwrapped
            env must be of exactly this class to be kept: a subclass might understand tasks
            otherwise.
        task: what ``set_task`` is given.
        wrapper_constructor: called as ``wrapper_constructor(env, task)`` on an env that had to be
            made; one that is kept keeps the wrappers it has.

    Raises:
        TypeError: ``env_type`` is no class with a method ``set_task``.
    """

    def __init__(
        self,
        env_type: type[AnyEnv],
        task: Any,
        wrapper_constructor: Callable[[AnyEnv, Any], AnyEnv] | None = None,
    ) -> None:
        if not (isinstance(env_type, type) and callable(getattr(env_type, "set_task", None))):
            raise TypeError(
                f"SetTaskUpdate got env_type={env_type!r}; it must be a class of env with a "
                "method set_task(task)"
            )
        self._env_type = env_type
        self._task = task
        self._wrapper_constructor = wrapper_constructor

    def __call__(self, old_env: AnyEnv | None = None) -> AnyEnv:
        """The same env with the task, or a new one; warns where a new one replaces another type."""
        if old_env is None:
            return self._make()
        inner = old_env.unwrapped
        if type(inner) is self._env_type:
            _set_task(inner, self._task)
            return old_env
        warnings.warn(
            f"SetTaskUpdate closes an env of type {type(inner).__name__} to make one of type "
            f"{self._env_type.__name__}; start the sampler with envs of that type to avoid it",
            stacklevel=2,
        )
        old_env.close()
        return self._make()

    def _make(self) -> AnyEnv:
        env: AnyEnv = self._env_type()
        _set_task(env.unwrapped, self._task)
        if self._wrapper_constructor is not None:
            return self._wrapper_constructor(env, self._task)
        return env


def _set_task(env: Any, task: Any) -> None:
    env.set_task(task)


class ExistingEnvUpdate(EnvUpdate):
    """Close the worker's env and step a copy of this one.

    Args:
        env: it is pickled for every worker, which may take long: hence a warning when it is.

    Raises:
        TypeError: it is no gymnasium env.
    """

    def __init__(self, env: AnyEnv) -> None:
        if not isinstance(env, gymnasium.Env):
            raise TypeError(
                f"ExistingEnvUpdate got {env!r}, which is no gymnasium env; use NewEnvUpdate for a "
                "function that makes one"
            )
        self._env = env

    def __call__(self, old_env: AnyEnv | None = None) -> AnyEnv:
        """The env that was given."""
        if old_env is not None:
            old_env.close()
        return self._env

    def __getstate__(self) -> dict[str, Any]:
        warnings.warn(
            f"ExistingEnvUpdate pickles a whole {type(self._env).__name__} for the workers; "
            "NewEnvUpdate sends only the function that makes one",
            stacklevel=2,
        )
        return self.__dict__


def as_env_update(env: AnyEnv | EnvUpdate | EnvFactory) -> AnyEnv | EnvUpdate:
    """An env given at construction, in the form in which workers take envs.

    Raises:
        TypeError: no env, update, env id or callable.
    """
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise TypeError(f"envs has a vector env ({type(env).__name__}); give single envs")
    if isinstance(env, gymnasium.Env | EnvUpdate):
        return env
    if isinstance(env, str) or callable(env):
        return NewEnvUpdate(env)
    raise TypeError(
        f"envs has {env_name(env)} ({env!r}); it must be a gymnasium env, an env id, a callable "
        "that makes an env, an EnvUpdate, or a list of them with one for each worker"
    )
