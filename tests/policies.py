"""Policies that tell what they saw and which weights they had. Imported by inference workers."""

import torch
from torch import nn

NUM_WEIGHTS = 3000


class TellingPolicy(nn.Module):
    """Its weights are to be equal: ``k``. Then it takes action ``k % num_actions``.

    Writes ``told``, smallest and largest of its weights, and ``seen``, the observation it was
    given, so that a batch shows whether weights were torn and which step an action answered.
    """

    in_keys = ("observation",)
    out_keys = ("action", "told", "seen")

    def __init__(self, num_actions=2):
        super().__init__()
        self.num_actions = num_actions
        self.weight = nn.Parameter(torch.zeros(NUM_WEIGHTS, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(NUM_WEIGHTS))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def become(self, k):
        """Set all weights to ``k``."""
        for tensor in (self.weight, self.bias, self.count):
            tensor.fill_(k)
        return self

    def forward(self, tensordict):
        seen = tensordict["observation"]
        weights = torch.cat([self.weight, self.bias.double(), self.count.double().view(1)])
        told = torch.stack(weights.aminmax()).expand(len(seen), 2)
        tensordict["told"] = told
        tensordict["action"] = told[:, 0].long() % self.num_actions
        tensordict["seen"] = seen.clone()
        return tensordict


class Pushing(nn.Module):
    """Acts as its bias says, which is 0."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, tensordict):
        return tensordict.set("action", self.bias.expand(*tensordict.batch_size, 1).clone())


class FailingPolicy(nn.Module):
    """Raises after a number of calls."""

    in_keys = ("observation",)
    out_keys = ("action",)

    def __init__(self, calls):
        super().__init__()
        self._left = calls

    def forward(self, tensordict):
        if self._left == 0:
            raise RuntimeError("the policy is lost")
        self._left -= 1
        return tensordict.set("action", torch.zeros(tensordict.batch_size, dtype=torch.int64))
