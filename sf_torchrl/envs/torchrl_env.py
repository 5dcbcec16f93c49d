"""TorchRL envs: what they observe and accept, and which of them are nothing but a gymnasium env.

Imported only where an env is TorchRL's, which has imported torch already.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import torch
from torchrl.data import Bounded, Categorical, Composite, OneHot, TensorSpec, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    GymEnv,
    GymLikeEnv,
    GymWrapper,
    InitTracker,
    RewardSum,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform

from sf_torchrl.envs.spaces import (
    DEFAULT_REWARD,
    RESERVED_KEYS,
    ActionSpec,
    EnvError,
    EnvSpecs,
    UnsupportedSpaceError,
    observation_features,
)
from sf_torchrl.envs.vector import check_autoreset
from sf_torchrl.memory.slab import ENDS, Feature, Key


def bare_gymnasium_env(env: EnvBase) -> gymnasium.Env[Any, Any] | None:
    """The gymnasium env inside a ``GymEnv`` or ``GymWrapper`` that changes nothing of it."""
    if type(env) not in (GymEnv, GymWrapper) or env.batch_size != torch.Size([]):
        return None
    inner = env._env
    if isinstance(inner, gymnasium.Env):
        _keep(inner, env)
    plain = (
        isinstance(inner, gymnasium.Env)
        and env.frame_skip == 1
        and env.wrapper_frame_skip == 1
        and not env.from_pixels
        and not env.info_dict_reader
        and env._convert_actions_to_numpy
        and _has_specs_of(env, inner)
    )
    return cast("gymnasium.Env[Any, Any]", inner) if plain else None


def _has_specs_of(env: EnvBase, inner: gymnasium.Env[Any, Any]) -> bool:
    """Keys, dtypes and shapes are those of the spaces, and the action spec is made of its space.

    TorchRL gives a number an axis, calls a sole ``state`` ``observation``; users replace specs.
    """
    try:
        observed = observation_features(inner.observation_space)
        told = _features(env.full_observation_spec, 0, "")
    except UnsupportedSpaceError:
        return True  # whoever steps it without its wrapper refuses it
    ends = {Feature((key,), "bool", (1,)) for key in ("done", *ENDS)}
    return (
        set(told) == set(observed)
        and set(_features(env.full_reward_spec, 0, "")) == set(DEFAULT_REWARD)
        and set(_features(env.full_done_spec, 0, "")) == ends
        and env.action_spec
        == _gym_to_torchrl_spec_transform(
            inner.action_space,
            device=env.device,
            categorical_action_encoding=env._categorical_action_encoding,
        )
    )


def without_counters(env: EnvBase) -> EnvBase:
    """The env without the transforms at its end that count what env workers count anyway.

    A default InitTracker, StepCounter or RewardSum costs 15 to 20 us a step; the batch has the same
    keys and values without them. One that another transform follows is left where it is.
    """
    if type(env) is not TransformedEnv or env.batch_size:
        return env
    if env.reward_keys != ["reward"] or tuple(env.reward_spec.shape) != (1,):
        return env
    whole = env.transform
    transforms = list(whole.transforms) if type(whole) is Compose else [whole]
    kept = len(transforms)
    while kept and _is_counter(transforms[kept - 1]):
        kept -= 1
    if kept == len(transforms):
        return env
    rest = [transform.clone() for transform in transforms[:kept]]
    stripped = TransformedEnv(env.base_env, Compose(*rest)) if rest else env.base_env
    _keep(stripped, env)
    return stripped


def _keep(inner: Any, outer: EnvBase) -> None:
    """Keep the wrapper as long as what is in it: TorchRL's envs close when they are forgotten."""
    inner.__dict__["_kept_wrapper"] = outer


def _is_counter(transform: Transform) -> bool:
    if type(transform) is InitTracker:
        return list(transform.init_keys) == ["is_init"]
    if type(transform) is StepCounter:
        keys = list(transform.step_count_keys)
        return transform.max_steps is None and keys == ["step_count"]
    if type(transform) is RewardSum:
        is_default = not transform.reward_spec and transform._reset_keys is None
        sums = list(zip(transform.in_keys, transform.out_keys, strict=True))
        return is_default and sums == [("reward", "episode_reward")]
    return False


def is_one_hot(env: EnvBase) -> bool:
    """Actions are TorchRL's one-hot vectors."""
    return type(env.action_spec) is OneHot


def read_torchrl_specs(env: EnvBase, name: str) -> EnvSpecs:
    """Specs of a TorchRL env.

    Raises:
        EnvError: a batch size of more than one dimension, or a device other than the CPU.
        UnsupportedSpaceError: something that no array of fixed shape can hold.
    """
    batch_size = tuple(env.batch_size)
    if len(batch_size) > 1:
        raise EnvError(
            f"env {name!r} has batch_size {batch_size}; at most one dimension is supported"
        )
    if env.device is not None and env.device.type != "cpu":
        raise EnvError(f"env {name!r} is on device {env.device}; env workers step envs on the CPU")
    _refuse_lossy_resets(env, name)
    ndims = len(batch_size)
    observation = _features(env.full_observation_spec, ndims, name)
    taken = sorted(RESERVED_KEYS.intersection(f.key[0] for f in observation if len(f.key) == 1))
    if taken:
        raise UnsupportedSpaceError(
            f"env {name!r} observes {taken}, which a batch needs itself; rename them, e.g. with "
            "torchrl.envs.RenameTransform"
        )
    return EnvSpecs(
        name=name,
        path="vectorized" if batch_size else "generic",
        envs_at_once=batch_size[0] if batch_size else 1,
        observation=observation,
        action=_action_spec(env.full_action_spec, ndims),
        is_dict=True,
        actions=_features(env.full_action_spec, ndims, name),
        reward=_features(env.full_reward_spec, ndims, name),
        done=_features(env.full_done_spec, ndims, name),
        torchrl_action_spec=env.full_action_spec[0] if batch_size else env.full_action_spec,
    )


def _refuse_lossy_resets(env: EnvBase, name: str) -> None:
    """``GymEnv(num_envs=N)`` makes a vector env in gymnasium's default mode (TorchRL 0.14.1)."""
    inner = env
    while isinstance(inner, TransformedEnv):
        inner = inner.base_env
    if isinstance(inner, GymWrapper) and isinstance(inner._env, gymnasium.vector.VectorEnv):
        mode, vector = check_autoreset(inner._env, name), inner._env
        is_dict = isinstance(vector.single_observation_space, gymnasium.spaces.Dict)
        if mode == gymnasium.vector.AutoresetMode.SAME_STEP and is_dict:
            raise EnvError(
                f"env {name!r}: TorchRL's wrapper loses parts of a Dict's final observation in "
                "autoreset mode SAME_STEP; give the vector env itself, or use DISABLED"
            )


def _features(spec: Composite, ndims: int, name: str) -> tuple[Feature, ...]:
    found = []
    for key, leaf in spec.items(True, True):
        path: Key = (key,) if isinstance(key, str) else tuple(key)
        if path[-1].startswith("_"):  # private, as in TorchRL's collectors
            continue
        dtype = str(leaf.dtype).removeprefix("torch.")
        is_ragged = any(size < 0 for size in leaf.shape)
        if not isinstance(leaf.dtype, torch.dtype) or dtype == "bfloat16" or is_ragged:
            raise UnsupportedSpaceError(
                f"env {name!r}: {'.'.join(path)!r} is {type(leaf).__name__} of shape "
                f"{tuple(leaf.shape)} and dtype {leaf.dtype}; shared memory holds arrays of "
                "numbers with a fixed shape. Leave it out, e.g. with torchrl.envs.ExcludeTransform"
            )
        found.append(Feature(path, dtype, tuple(leaf.shape[ndims:])))
    return tuple(found)


def _action_spec(full: Composite, ndims: int) -> ActionSpec:
    leaves: list[TensorSpec] = list(full.values(True, True))
    if len(leaves) != 1:
        return ActionSpec(kind="other")
    (leaf,) = leaves
    shape = tuple(leaf.shape[ndims:])
    if type(leaf) is OneHot and len(shape) == 1:
        return ActionSpec(kind="discrete", n=shape[0], one_hot=True)
    if type(leaf) is Categorical and shape == () and isinstance(leaf.space.n, int):
        return ActionSpec(kind="discrete", n=leaf.space.n)
    if isinstance(leaf, Bounded | Unbounded) and leaf.dtype.is_floating_point:
        one = leaf[0] if ndims else leaf
        low, high = (
            tuple(bound.expand(shape).flatten().tolist())
            for bound in (one.space.low, one.space.high)
        )
        dtype = str(leaf.dtype).removeprefix("torch.")
        return ActionSpec(kind="box", shape=shape, dtype=dtype, low=low, high=high)
    return ActionSpec(kind="other", shape=shape)


def first_reset(env: EnvBase, seed: int) -> Any:
    """Seed and reset, so that a wrapped gymnasium env begins as it does without its wrapper."""
    env.set_seed(seed)
    inner = env
    while isinstance(inner, TransformedEnv):
        inner = inner.base_env
    if isinstance(inner, GymLikeEnv) and not inner.batch_size:
        return env.reset(seed=seed)  # set_seed has reset it once: begin again, from the seed
    return env.reset()
