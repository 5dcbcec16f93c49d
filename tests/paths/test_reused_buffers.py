"""An env may write into what it has returned, the reset at an episode's end included."""

from functools import partial
from itertools import islice

import pytest
import torch
from endings import wrapped
from envs import CountingEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import (
    Compose,
    EnvBase,
    GymWrapper,
    RewardScaling,
    SerialEnv,
    Transform,
    TransformedEnv,
)


class Hooked(Transform):
    """Has something to do between two steps, though it does nothing."""

    def _post_step_mdp_hooks(self, tensordict, tensordict_):
        return tensordict, tensordict_


class Reusing(EnvBase):
    """TorchRL's own, of one env or of several: observes ``(episode, step)`` in the same memory."""

    def __init__(self, lengths=(3,), batch_size=()):
        super().__init__(batch_size=batch_size)
        self.observation_spec = Composite(observation=Unbounded((*batch_size, 2)), shape=batch_size)
        self.action_spec = Categorical(2, shape=batch_size)
        self.reward_spec = Unbounded((*batch_size, 1))
        self._lengths = torch.tensor(lengths).view(*batch_size, 1)
        self._seen = torch.zeros(*batch_size, 2)
        self._reward = torch.zeros(*batch_size, 1)
        self._ended = torch.zeros(*batch_size, 1, dtype=torch.bool)

    def _reset(self, tensordict=None):
        which = None if tensordict is None else tensordict.get("_reset", None)
        which = torch.ones_like(self._ended) if which is None else which
        self._seen += torch.cat([which, -self._seen[..., 1:] * which], -1)
        self._reward.masked_fill_(which, -1)
        self._ended.masked_fill_(which, False)
        return TensorDict({"observation": self._seen}, self.batch_size)

    def _step(self, tensordict):
        self._seen[..., 1] += 1
        self._reward.copy_(self._seen[..., 1:])
        self._ended.copy_(self._seen[..., 1:] == self._lengths)
        ends = {"done": self._ended, "terminated": self._ended}
        found = {"observation": self._seen, "reward": self._reward, **ends}
        return TensorDict(found, self.batch_size)

    def _set_seed(self, seed):
        pass


def counting():
    return CountingEnv(length=(3, 4), ends=("terminated", "truncated"), reuse_buffer=True)


def scaling():
    return RewardScaling(loc=0.0, scale=1.0)


def without_copies(mode):
    return SyncVectorEnv([counting] * 2, autoreset_mode=mode, copy=False)


GYMNASIUMS = {
    "raw": counting,
    "a transform": lambda: TransformedEnv(wrapped(counting), scaling()),
    "transforms": lambda: TransformedEnv(wrapped(counting), Compose(scaling(), scaling())),
    "a hook": lambda: TransformedEnv(wrapped(counting), Hooked()),
    "SyncVectorEnv, DISABLED": partial(without_copies, AutoresetMode.DISABLED),
    "GymWrapper of a vector env": lambda: GymWrapper(
        without_copies(AutoresetMode.DISABLED), categorical_action_encoding=True
    ),
    "SerialEnv": lambda: SerialEnv(2, partial(wrapped, counting)),
}
TORCHRLS = {
    "one env": Reusing,
    "transforms": lambda: TransformedEnv(Reusing(), Compose(scaling())),
    "a hook": lambda: TransformedEnv(Reusing(), Hooked()),
    "several": partial(Reusing, (3, 4), (2,)),
    "several with a transform": lambda: TransformedEnv(Reusing((3, 4), (2,)), scaling()),
    "SerialEnv": partial(SerialEnv, 2, Reusing),
}


def assert_steps_follow(batch, episode, step):
    """What follows a step is of the same episode, even where a reset has been."""
    before, after = batch["observation"], batch["next", "observation"]
    assert torch.equal(after[..., episode], before[..., episode])
    assert torch.equal(after[..., step], before[..., step] + 1)
    done = batch["next", "done"][..., 0]
    assert done.any()
    assert torch.equal((before[:, 1:, step] == 0), done[:, :-1])


@pytest.mark.parametrize("name", GYMNASIUMS)
def test_a_gymnasium_env_may_reuse_what_it_observes(make_collector, name):
    (batch,) = islice(make_collector(GYMNASIUMS[name], rollout_length=10), 1)
    assert_steps_follow(batch, 1, 2)


@pytest.mark.parametrize("name", TORCHRLS)
def test_a_torchrl_env_may_reuse_all_that_it_returns(make_collector, name):
    (batch,) = islice(make_collector(TORCHRLS[name], rollout_length=10), 1)
    assert_steps_follow(batch, 0, 1)
    assert torch.equal(batch["next", "reward"], batch["next", "observation"][..., 1:])
