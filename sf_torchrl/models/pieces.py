"""Rows through a network in pieces, by several threads if wanted, as one step of one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

Part = Callable[[Tensor], Tensor]


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    """Threads that wait for work without spinning, so that env workers get the cores meanwhile."""
    return ThreadPoolExecutor(count, thread_name_prefix="sf_torchrl pieces")


def in_pieces(part: Part, x: Tensor, rows: int) -> Tensor:
    """``part`` of all rows of ``x``, ``rows`` at a time: the graph is that of the whole."""
    pieces = [part(piece) for piece in torch.split(x, rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def in_threads(
    part: Part, x: Tensor, rows: int, parameters: Sequence[Tensor], num_threads: int
) -> Tensor:
    """As :func:`in_pieces`, the pieces shared among threads, forward and backward.

    Threads of torch's own share single operations instead: too small here to be worth it, and they
    spin while they wait for each other. Set them to one: each of these has as many again.

    Args:
        part: takes and returns ``[n, ...]``.
        x: ``[N, ...]``, needs no gradient.
        rows: of one piece.
        parameters: of ``part``; their gradients are summed over threads.
        num_threads: how many.
    """
    return _InThreads.apply(part, x, rows, num_threads, *parameters)  # type: ignore[no-any-return, no-untyped-call]


class _InThreads(torch.autograd.Function):
    """Each thread keeps the graph of its share; backward goes through all of them at once."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, x: Tensor, rows: int, num_threads: int, *parameters: Tensor
    ) -> Tensor:
        device, dtype = x.device.type, torch.get_autocast_dtype(x.device.type)
        autocast = torch.is_autocast_enabled(device)

        def run(share: Tensor) -> Tensor:
            with torch.enable_grad(), torch.autocast(device, dtype, enabled=autocast):
                return in_pieces(part, share, rows)

        pieces = -(-len(x) // rows)
        share = -(-pieces // num_threads) * rows
        ctx.pool = _threads(num_threads)
        ctx.outputs = list(ctx.pool.map(run, torch.split(x, share)))
        ctx.parameters = parameters
        return torch.cat([output.detach() for output in ctx.outputs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        def run(output: Tensor, share: Tensor) -> tuple[Tensor, ...]:
            return tuple(torch.autograd.grad(output, ctx.parameters, share))

        shares = torch.split(grad, [len(output) for output in ctx.outputs])
        first, *others = ctx.pool.map(run, ctx.outputs, shares)
        gradients = list(first)
        for other in others:
            torch._foreach_add_(gradients, list(other))
        ctx.outputs = None
        return None, None, None, None, *gradients
