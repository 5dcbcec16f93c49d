"""What the tests of returns and losses say about rollouts in the same words."""

import torch


def stretches(done, mask):
    """Slices of consecutive unmasked steps of one episode of one rollout."""
    start = 0
    for t in range(len(done)):
        if not mask[t]:
            start = t + 1
        elif done[t] or t + 1 == len(done) or not mask[t + 1]:
            yield slice(start, t + 1)
            start = t + 1


def row(*numbers):
    """``[1, T]`` float64."""
    return torch.tensor([numbers], dtype=torch.float64)


def flags(*numbers):
    """``[1, T]`` bool."""
    return torch.tensor([numbers]).bool()


def assert_same_bits(a, b):
    """Equal tensor by tensor, without any tolerance."""
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
