"""Pieces and threads change who computes, not what."""

import pytest
import torch
from torch import nn

from sf_torchrl.models.pieces import in_pieces, in_threads


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))


def outcome(run, part, x):
    part.zero_grad()
    found = run(part, x)
    (found.square() * torch.arange(found.numel()).view_as(found)).mean().backward()
    return [found.detach(), *(p.grad.clone() for p in part.parameters())]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [1, 4, 7])
def test_threads_give_the_result_and_the_gradient_of_the_whole(rows, num_threads):
    part, x = network(), torch.randn(13, 2, 8, 8)

    def threaded(part, x):
        return in_threads(part, x, rows, list(part.parameters()), num_threads)

    whole = outcome(lambda part, x: part(x), part, x)
    for run in (threaded, lambda part, x: in_pieces(part, x, rows)):
        for one, other in zip(outcome(run, part, x), whole, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_every_thread_has_a_share():
    seen = set()

    def part(x):
        import threading

        seen.add(threading.current_thread().name)
        return x * weight

    weight = torch.ones(1, requires_grad=True)
    barrierless = torch.randn(64, 3)
    for _ in range(20):
        in_threads(part, barrierless, 4, [weight], 2).sum().backward()
    assert len(seen) == 2
    assert all(name.startswith("sf_torchrl pieces") for name in seen)


def test_autocast_holds_in_threads_too():
    part, x = network(), torch.randn(8, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = in_threads(part, x, 2, list(part.parameters()), 2)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert {p.grad.dtype for p in part.parameters()} == {torch.float32}


def test_an_error_in_a_thread_is_raised():
    def part(x):
        raise RuntimeError("too deep")

    with pytest.raises(RuntimeError, match="too deep"):
        in_threads(part, torch.randn(8, 3), 2, [torch.ones(1, requires_grad=True)], 2)
