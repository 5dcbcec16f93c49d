"""Pieces and threads change who computes, not what."""

import threading

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


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_as_many_threads_take_pieces_as_are_asked_for(num_threads):
    """Each of as many pieces waits until all of them are in hand."""
    together = threading.Barrier(num_threads)

    def part(x):
        together.wait(timeout=60)
        return x * weight

    weight = torch.ones(1, requires_grad=True)
    x = torch.randn(4 * num_threads, 3)
    found = in_threads(part, x, 4, [weight], num_threads)
    torch.testing.assert_close(found, x)


def test_the_gradient_does_not_depend_on_which_thread_did_what():
    """Sums of floats depend on the order: bit for bit, twenty times, with uneven work."""
    part, x = network(), torch.randn(64, 2, 8, 8)

    def uneven(piece):
        for _ in range(int(torch.randint(0, 4, ()))):
            part(piece)
        return part(piece)

    def run(_, x):
        return in_threads(uneven, x, 4, list(part.parameters()), 3)

    first, *others = [outcome(run, part, x) for _ in range(20)]
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))


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
