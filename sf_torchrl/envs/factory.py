"""Making envs. Free of torch: env workers use it."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv
from gymnasium.wrappers import OrderEnforcing, TimeLimit

from sf_torchrl.envs.spaces import EnvError

EnvFactory = str | Callable[[], Any]
"""A gymnasium env id, one of this package's envs (``doom_basic``, ``atari_pong``, ``memory_tmaze``
and their like), the name ``module:function`` of a function that makes one env, or a callable that
makes one env a call: gymnasium's ``Env`` or ``VectorEnv``, or TorchRL's ``EnvBase``."""

_FAMILIES = {"doom_": "sf_torchrl.envs.doom:DoomEnv", "atari_": "sf_torchrl.envs.atari:AtariEnv"}
"""Envs of this package whose names end in the scenario or game, which is the first argument."""
_OWN = {"memory_tmaze": "sf_torchrl.envs.tmaze:TMaze"}


def env_name(create_env_fn: EnvFactory) -> str:
    """A name for messages: the id, or what the callable calls itself."""
    if isinstance(create_env_fn, str):
        return create_env_fn
    if isinstance(create_env_fn, partial):
        named = create_env_fn.args[0] if create_env_fn.args else create_env_fn.func
        return env_name(named)
    return getattr(create_env_fn, "__name__", type(create_env_fn).__name__)


def is_torchrl(env: object) -> bool:
    """Whether it is TorchRL's ``EnvBase``; does not import torchrl."""
    common = sys.modules.get("torchrl.envs.common")
    return common is not None and isinstance(env, common.EnvBase)


def is_env(value: object) -> bool:
    """Whether it is an env already, and no function that makes one."""
    return isinstance(value, gymnasium.Env | VectorEnv) or is_torchrl(value)


def make_env(create_env_fn: EnvFactory) -> Any:
    """Make one env: gymnasium's ``Env`` or ``VectorEnv``, or TorchRL's ``EnvBase``.

    Raises:
        EnvError: the id is unknown, or what the callable returned is no env.
        Exception: whatever the env's own constructor raises.
    """
    if isinstance(create_env_fn, str):
        return _make_named(create_env_fn)
    env: Any = create_env_fn()
    if is_env(env):
        return env
    if not all(hasattr(env, name) for name in ("reset", "step", "observation_space")):
        raise EnvError(
            f"{env_name(create_env_fn)} made {env!r}, which is neither a gymnasium nor a TorchRL "
            "env; create_env_fn must make one env a call"
        )
    return env


def _make_named(name: str, /, **kwargs: Any) -> Any:
    function = _function_named(name)
    return (
        _make_by_id(name, **kwargs) if function is None else make_env(partial(function, **kwargs))
    )


def _make_by_id(name: str, /, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    try:
        # The checker looks at the first steps only, which try_out does too.
        return gymnasium.make(name, disable_env_checker=True, **kwargs)
    except gymnasium.error.Error as error:
        _refuse_misspelled(name)
        raise EnvError(f"cannot make env id {name!r}: {error}") from None


def gymnasium_env(env: Any) -> gymnasium.Env[Any, Any]:
    """The gymnasium env that env workers step, without what costs time and does nothing for them.

    Raises:
        EnvError: there is none: it is vectorized, or TorchRL's own.
    """
    if is_torchrl(env):
        from sf_torchrl.envs.torchrl_env import bare_gymnasium_env, without_counters

        inner = bare_gymnasium_env(without_counters(env))
        if inner is None:
            raise EnvError(f"{env!r} is no gymnasium env; this needs one")
        env = inner
    if isinstance(env, VectorEnv):
        raise EnvError(f"{env!r} is vectorized; this needs a single gymnasium env")
    return _without_order_enforcing(env)


def with_arguments(create_env_fn: EnvFactory, kwargs: Mapping[str, Any]) -> EnvFactory:
    """The factory with keyword arguments given to each call."""
    if not kwargs:
        return create_env_fn
    if isinstance(create_env_fn, str):
        return partial(_make_named, create_env_fn, **kwargs)
    return partial(create_env_fn, **kwargs)


def with_time_limit(create_env_fn: EnvFactory, max_steps: int | None) -> EnvFactory:
    """The factory with episodes truncated after ``max_steps``.

    Raises (each call):
        EnvError: the env is vectorized by gymnasium: its parts cannot be limited from outside.
    """
    return create_env_fn if max_steps is None else partial(_make_limited, create_env_fn, max_steps)


def _make_limited(create_env_fn: EnvFactory, max_steps: int) -> Any:
    env = make_env(create_env_fn)
    if isinstance(env, VectorEnv):
        raise EnvError(
            f"max_frames_per_traj={max_steps} cannot limit the envs of {type(env).__name__}; put "
            "gymnasium.wrappers.TimeLimit around each of them"
        )
    if not is_torchrl(env):
        return TimeLimit(env, max_steps)
    from torchrl.envs import StepCounter, TransformedEnv

    from sf_torchrl.envs.torchrl_env import bare_gymnasium_env, without_counters

    env = without_counters(env)
    inner = bare_gymnasium_env(env)
    if inner is None:
        return TransformedEnv(env, StepCounter(max_steps=max_steps), auto_unwrap=False)
    env._env = TimeLimit(inner, max_steps)
    return env


def _function_named(name: str) -> Callable[..., Any] | None:
    """The function that a name stands for; None where it is an env id."""
    for prefix, family in _FAMILIES.items():
        if name.startswith(prefix) and ":" not in name and name not in gymnasium.registry:
            function = _function_named(family)
            assert function is not None
            return partial(function, name.removeprefix(prefix))
    module_name, colon, attribute = _OWN.get(name, name).partition(":")
    if not colon:
        return None
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:
            raise
        raise EnvError(f"env {name!r}: there is no module {module_name!r}") from None
    return getattr(module, attribute, None)


def _refuse_misspelled(name: str) -> None:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return
    close = difflib.get_close_matches(attribute, dir(sys.modules[module_name]), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise EnvError(
        f"module {module_name!r} has no function or env id {attribute!r}{hint}"
    ) from None


def _without_order_enforcing(env: gymnasium.Env[Any, Any]) -> gymnasium.Env[Any, Any]:
    """Drop the wrapper that checks for a reset before the first step: workers always reset first.

    It costs 0.2 us a step, 4 % of CartPole.
    """
    if isinstance(env, OrderEnforcing):
        return env.env
    outer = env
    while isinstance(outer, gymnasium.Wrapper):
        if isinstance(outer.env, OrderEnforcing):
            outer.env = outer.env.env
        outer = outer.env
    return env
