"""The same gymnasium env on each path."""

from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torchrl.envs import GymWrapper, RewardScaling, SerialEnv, TransformedEnv


def wrapped(make):
    return GymWrapper(make(), categorical_action_encoding=True)


def transformed(make):
    """A transform that changes nothing, but is there."""
    return TransformedEnv(wrapped(make), RewardScaling(loc=0.0, scale=1.0))


def same_step(make):
    return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.SAME_STEP)


def disabled(make):
    return SyncVectorEnv([make] * 2, autoreset_mode=AutoresetMode.DISABLED)


def wrapped_vector(make):
    return GymWrapper(disabled(make), categorical_action_encoding=True)


def serial(make):
    return SerialEnv(2, lambda: wrapped(make))


PATHS = {
    "raw": (lambda make: make(), "raw"),
    "bare wrapper": (wrapped, "raw"),
    "generic": (transformed, "generic"),
    "SyncVectorEnv, SAME_STEP": (same_step, "vectorized"),
    "SyncVectorEnv, DISABLED": (disabled, "vectorized"),
    "GymWrapper of a vector env": (wrapped_vector, "vectorized"),
    "SerialEnv": (serial, "vectorized"),
}
"""What makes an env of a function that makes gymnasium's, and the path that it takes."""


def lanes(batch, count):
    """The steps of each of ``count`` envs, in time: of a collector without worker processes.

    Its splits take turns, so that every ``count`` rollouts hold one of each env, in order.
    """
    return [batch[env::count].reshape(-1) for env in range(count)]
