"""Without processes, envs that draw from torch's own generator leave the program's alone."""

from itertools import islice

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase


class Drawing(EnvBase):
    """Observes numbers that it draws from torch's own generator."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)), made=Unbounded((1,)))
        self.action_spec = Categorical(2)
        self.reward_spec = Unbounded((1,))
        self._made = torch.rand(1)

    def _reset(self, tensordict=None):
        return TensorDict({"observation": torch.rand(1), "made": self._made})

    def _step(self, tensordict):
        drawn = torch.rand(1)
        ended = drawn > 0.8
        observed = {"observation": drawn, "made": self._made}
        return TensorDict({**observed, "reward": drawn, "done": ended, "terminated": ended})

    def _set_seed(self, seed):
        pass


class Reseeding(Drawing):
    """Seeds torch's own generator, as many of TorchRL's envs do."""

    def _set_seed(self, seed):
        torch.manual_seed(seed)


@pytest.mark.parametrize("make", [Drawing, Reseeding])
def test_a_seed_gives_the_same_whatever_else_is_drawn(make_collector, make):
    found = []
    for outside in (0, 5):
        collector = make_collector(make)
        torch.manual_seed(outside)
        (batch,) = islice(collector, 1)
        found.append(batch)
    for key in ("observation", "made", "action"):
        assert torch.equal(*(batch[key] for batch in found)), key


@pytest.mark.parametrize("make", [Drawing, Reseeding])
def test_the_programs_own_random_numbers_go_on(make_collector, make):
    collector = make_collector(make)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(islice(collector, 2))
    assert torch.equal(torch.get_rng_state(), before)
