"""An env function that makes another kind of env in a later call is refused, whatever the path."""

from functools import partial

import gymnasium
import numpy as np
import pytest
from endings import disabled, serial, transformed, wrapped
from gymnasium.wrappers import TransformObservation
from seeded import cartpole, pendulum
from torchrl.envs import GymWrapper, SerialEnv


class Changing:
    """Makes the one kind of env in its first call, the other in every later one."""

    def __init__(self, first, later):
        self._first, self._later, self._calls = first, later, 0

    def __call__(self):
        self._calls += 1
        return self._first() if self._calls == 1 else self._later()


def observing(shape, dtype):
    """Zeros, in a space of its own."""
    space = gymnasium.spaces.Box(-1, 1, shape, dtype)
    return TransformObservation(cartpole(), lambda _: np.zeros(shape, dtype), space)


def in_a_dict():
    space = gymnasium.spaces.Dict(observation=cartpole().observation_space)
    return TransformObservation(cartpole(), lambda observation: {"observation": observation}, space)


def narrow():
    env = pendulum()
    env.action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    return env


one_number = partial(observing, (1,), np.float32)
in_double = partial(observing, (4,), np.float64)
four_at_once = partial(observing, (2, 4), np.float32)
threefold = partial(SerialEnv, 3, partial(wrapped, cartpole))

KINDS = {
    # What broadcasts into the rows of the first.
    "fewer numbers": (cartpole, one_number, r"float32\[4\].*float32\[1\]"),
    "more axes": (cartpole, four_at_once, r"float32\[4\].*float32\[2, 4\]"),
    "another dtype": (cartpole, in_double, r"float32\[4\].*float64\[4\]"),
    "a Dict": (cartpole, in_a_dict, r"observes observation.*observes a Dict of observation"),
    "other actions": (cartpole, pendulum, r"'discrete'.*'box'"),
    "other bounds": (pendulum, narrow, r"low=\(-2.0,\).*low=\(-1.0,\)"),
    "bare wrapper": (
        partial(wrapped, cartpole),
        partial(wrapped, one_number),
        r"float32\[4\].*float32\[1\]",
    ),
    "another encoding": (
        partial(wrapped, cartpole),
        lambda: GymWrapper(cartpole()),
        r"one_hot=False.*one_hot=True",
    ),
    "another path": (cartpole, partial(transformed, cartpole), r"raw path.*generic path"),
    "generic": (
        partial(transformed, cartpole),
        partial(transformed, one_number),
        r"float32\[4\].*float32\[1\]",
    ),
    "vector env": (
        partial(disabled, cartpole),
        partial(disabled, one_number),
        r"float32\[4\].*float32\[1\]",
    ),
    "another batch size": (partial(serial, cartpole), threefold, r"2 at once.*3 at once"),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_env_that_differs_from_the_one_tried_out_is_refused_by_the_values(make_collector, name):
    first, later, values = KINDS[name]
    collector = make_collector(Changing(first, later))
    with pytest.raises(ValueError, match=rf"envs differ between calls of 'Changing': .*{values}"):
        next(iter(collector))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["fewer numbers", "generic"])
def test_a_worker_process_refuses_an_env_that_differs(make_collector, name):
    first, later, values = KINDS[name]
    collector = make_collector(Changing(first, later), num_workers=1)
    with pytest.raises(RuntimeError, match=rf"envs differ between calls of 'Changing': .*{values}"):
        next(iter(collector))
