"""Trying an env out before any process starts: what it observes and accepts, and whether it works.

Free of torch unless the env is TorchRL's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from sf_torchrl.envs.factory import EnvFactory, env_name, is_env, is_torchrl, make_env
from sf_torchrl.envs.spaces import (
    EnvError,
    EnvSpecs,
    UnsupportedSpaceError,
    number,
    pick,
    read_specs,
)
from sf_torchrl.envs.vector import VectorEnvAdapter
from sf_torchrl.memory.slab import Feature, Key

_OLD_API = (
    "uses the Gym API from before 0.26; gymnasium's reset returns (observation, info) and its step "
    "returns (observation, reward, terminated, truncated, info). Port it, or wrap it with shimmy"
)


def try_out(create_env_fn: EnvFactory) -> EnvSpecs:
    """Make an env, reset it, step it once, close it, and return what it observes and accepts.

    Raises:
        EnvError: it breaks its interface's contract, or its constructor, ``reset`` or ``step``
            raised (the original exception is the cause).
        UnsupportedSpaceError: one of its spaces is not supported.
    """
    name = env_name(create_env_fn)
    if is_env(create_env_fn):
        raise EnvError(
            f"create_env_fn is an env already ({type(create_env_fn).__name__}); give a function "
            "that makes one, e.g. lambda: GymEnv('CartPole-v1'): every worker makes its own"
        )
    try:
        env = make_env(create_env_fn)
    except EnvError:
        raise
    except Exception as error:
        message = f"making env {name!r} raised {type(error).__name__}: {error}"
        if "unexpected keyword argument" in message:  # the user's; a traceback tells no more
            raise EnvError(message) from None
        raise EnvError(message) from error
    try:
        stepped, specs = _read(env, name)
        if specs.torchrl_action_spec is not None:
            _try_torchrl(stepped, specs)
        elif specs.path == "vectorized":
            _try_vectorized(stepped, specs)
        else:
            _try_single(stepped, specs)
        return specs
    finally:
        env.close()


def try_out_all(factories: Sequence[EnvFactory]) -> EnvSpecs:
    """Try out each of several factories once; all must make the same kind of env.

    Raises:
        EnvError: two of them observe or accept different things; also as for :func:`try_out`.
    """
    distinct = list({id(factory): factory for factory in factories}.values())
    first, *others = [try_out(factory) for factory in distinct]
    for other in others:
        if replace(other, name=first.name) != first:
            raise EnvError(
                f"envs differ between workers: {first.name!r} {_summary(first)}, "
                f"{other.name!r} {_summary(other)}; all must observe and accept the same"
            )
    return first


def make_alike(create_env_fn: EnvFactory, specs: EnvSpecs, states: Collection[Key] = ()) -> Any:
    """Make one more of the envs that were tried out, and return what is to be stepped of it.

    Args:
        create_env_fn: makes it.
        specs: of the one tried out, without ``states``.
        states: what the env has for the policy to carry, as TorchRL's primers do.

    Raises:
        EnvError: it does not observe or accept what ``specs`` say; also as for
            :func:`~sf_torchrl.envs.factory.make_env`.
        UnsupportedSpaceError: one of its spaces is not supported.
    """
    name = env_name(create_env_fn)
    env, made = _read(make_env(create_env_fn), name)
    made = replace(made, observation=tuple(f for f in made.observation if f.key not in states))
    if replace(made, name=specs.name, torchrl_action_spec=specs.torchrl_action_spec) != specs:
        raise EnvError(
            f"envs differ between calls of {name!r}: the one tried out {_summary(specs)}, a later "
            f"one {_summary(made)}; all must observe and accept the same"
        )
    return env


def _read(env: Any, name: str) -> tuple[Any, EnvSpecs]:
    """What is to be stepped of an env, and what that observes and accepts."""
    if is_torchrl(env):
        return _read_torchrl(env, name)
    if not isinstance(env, VectorEnv):
        specs = read_specs(env.observation_space, env.action_space, name)
        return env, replace(specs, frame_skip=_frame_skip(env))
    count = VectorEnvAdapter(env, name).num_envs
    specs = read_specs(env.single_observation_space, env.single_action_space, name)
    return env, replace(specs, path="vectorized", envs_at_once=count)


def _frame_skip(env: gymnasium.Env[Any, Any]) -> int:
    """What the env says of itself; 1 where it says nothing, or that it varies."""
    said = env.metadata.get("frame_skip", 1)
    return said if isinstance(said, int) and said > 0 else 1


def _read_torchrl(env: Any, name: str) -> tuple[Any, EnvSpecs]:
    from sf_torchrl.envs.torchrl_env import (
        bare_gymnasium_env,
        is_one_hot,
        read_torchrl_specs,
        without_counters,
    )

    env = without_counters(env)
    inner = bare_gymnasium_env(env)
    if inner is not None:
        with contextlib.suppress(UnsupportedSpaceError):  # TorchRL may have a spec for it
            specs = read_specs(inner.observation_space, inner.action_space, name)
            if is_one_hot(env):
                one_hot = replace(specs.action, one_hot=True)
                (action,) = specs.actions
                specs = replace(
                    specs, action=one_hot, actions=(replace(action, shape=(one_hot.n,)),)
                )
            return inner, replace(specs, frame_skip=_frame_skip(inner))
    return env, read_torchrl_specs(env, name)


def _summary(specs: EnvSpecs) -> str:
    def told(features: Sequence[Feature]) -> str:
        parts = (f"{'.'.join(f.key)} {f.dtype}{list(f.shape)}" for f in features)
        return ", ".join(parts)

    kind = "a Dict of " if specs.is_dict else ""
    count = f", {specs.envs_at_once} at once" if specs.envs_at_once > 1 else ""
    return (
        f"observes {kind}{told(specs.observation)}, earns {told(specs.reward)} and takes "
        f"{specs.action} ({specs.path} path{count})"
    )


def _try_single(env: gymnasium.Env[Any, Any], specs: EnvSpecs) -> None:
    env.action_space.seed(0)
    with _blamed(specs.name, "reset"):
        result: Any = env.reset(seed=0)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise EnvError(f"env {specs.name!r} {_OLD_API}; its reset returned {_outline(result)}")
    _check_observation(result[0], specs, "reset", ())
    with _blamed(specs.name, "step"):
        result = env.step(env.action_space.sample())
    if not (isinstance(result, tuple) and len(result) == 5):
        raise EnvError(f"env {specs.name!r} {_OLD_API}; its step returned {_outline(result)}")
    _check_observation(result[0], specs, "step", ())
    try:
        number(result[1])
    except (TypeError, ValueError, RuntimeError):
        raise EnvError(f"env {specs.name!r}: reward {result[1]!r} is not a number") from None


def _try_vectorized(env: VectorEnv[Any, Any, Any], specs: EnvSpecs) -> None:
    adapter = VectorEnvAdapter(env, specs.name)
    count = adapter.num_envs
    env.single_action_space.seed(0)
    with _blamed(specs.name, "reset"):
        observation = env.reset()[0]
    _check_observation(observation, specs, "reset", (count,))
    actions = np.stack([np.asarray(env.single_action_space.sample()) for _ in range(count)])
    with _blamed(specs.name, "step"):
        observation, *_ = adapter.step(actions)
    _check_observation(observation, specs, "step", (count,))


def _try_torchrl(env: Any, specs: EnvSpecs) -> None:
    with _blamed(specs.name, "reset"):
        found = env.reset()
    _check_torchrl(found, specs.observation, specs, "reset")
    with _blamed(specs.name, "step"):
        found = env.rand_step(found).get("next")
    for features in (specs.observation, specs.reward, specs.done):
        _check_torchrl(found, features, specs, "step")


def _check_torchrl(found: Any, features: Sequence[Any], specs: EnvSpecs, method: str) -> None:
    lead = (specs.envs_at_once,) if specs.path == "vectorized" else ()
    for feature in features:
        label = ".".join(feature.key)
        value = found.get(feature.key, None)
        if value is None:
            raise EnvError(
                f"env {specs.name!r}: {method} returned no {label!r}, which its specs have"
            )
        if tuple(value.shape) != lead + feature.shape:
            raise EnvError(
                f"env {specs.name!r}: {method} returned {label!r} of shape {tuple(value.shape)}, "
                f"its specs say {lead + feature.shape}"
            )


@contextlib.contextmanager
def _blamed(name: str, method: str) -> Iterator[None]:
    """What an env raises becomes one line that names it."""
    try:
        yield
    except TypeError as error:
        if "seed" in str(error):  # reset() of an old env takes no seed
            raise EnvError(f"env {name!r} {_OLD_API}; {method} raised: {error}") from error
        raise EnvError(f"{method} of env {name!r} raised TypeError: {error}") from error
    except Exception as error:
        raise EnvError(
            f"{method} of env {name!r} raised {type(error).__name__}: {error}"
        ) from error


def _outline(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return f"a {type(result).__name__}"


def _check_observation(
    observation: Any, specs: EnvSpecs, method: str, lead: tuple[int, ...]
) -> None:
    for feature in specs.observation:
        label = ".".join(feature.key)
        try:
            part = pick(observation, feature.key) if specs.is_dict else observation
            value = np.asarray(part)
        except (KeyError, TypeError):
            raise EnvError(
                f"env {specs.name!r}: {method} returned no {label!r}, "
                "which its observation_space has"
            ) from None
        if value.shape != lead + feature.shape:
            raise EnvError(
                f"env {specs.name!r}: {method} returned {label!r} of shape {value.shape}, "
                f"its observation_space says {lead + feature.shape}"
            )
