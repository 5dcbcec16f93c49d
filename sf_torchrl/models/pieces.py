"""Rows through a network in pieces, by several threads if wanted, as one step of one graph."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

Part = Callable[[Tensor], Tensor]

HELPERS_NICENESS = 5
"""Of the threads that help the learner's; env workers and inference worker have 0."""


@lru_cache(maxsize=1)
def _helpers(count: int) -> ThreadPoolExecutor:
    """Threads beside the calling one that wait without spinning: env workers get the cores."""
    return ThreadPoolExecutor(count, thread_name_prefix="sf_torchrl pieces", initializer=_give_way)


def _give_way() -> None:
    """Take what the cores have left: a helper that is stopped holds up one piece, an env all."""
    torch.set_num_threads(torch.get_num_threads())  # OpenMP counts by thread: or it would be all
    if hasattr(os, "setpriority"):  # Linux alone has it by thread
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), HELPERS_NICENESS)


def in_pieces(part: Part, x: Tensor, rows: int) -> Tensor:
    """``part`` of all rows of ``x``, ``rows`` at a time: the graph is that of the whole."""
    pieces = [part(piece) for piece in torch.split(x, rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def in_threads(
    part: Part, x: Tensor, rows: int, parameters: Sequence[Tensor], num_threads: int
) -> Tensor:
    """As :func:`in_pieces`, each piece done by the thread that is free, forward and backward.

    Threads of torch's own share single operations instead: too small here to be worth it, and they
    spin while they wait for each other. Set them to one: each of these has as many again.

    Args:
        part: takes and returns ``[n, ...]``.
        x: ``[N, ...]``, needs no gradient.
        rows: of one piece.
        parameters: of ``part``; their gradients are summed over pieces, in the order of the
            pieces, whichever thread did which.
        num_threads: how many, the calling one among them.
    """
    return _InThreads.apply(part, x, rows, num_threads, *parameters)  # type: ignore[no-any-return, no-untyped-call]


def _share_out(tasks: Sequence[Callable[[], Any]], num_threads: int) -> list[Any]:
    """Results of all tasks, in order; an error in one is raised here when all threads are done."""
    results: list[Any] = [None] * len(tasks)
    left = iter(range(len(tasks)))  # one step of it is atomic

    def take() -> None:
        for index in left:
            results[index] = tasks[index]()

    others = num_threads - 1
    waiting = [_helpers(others).submit(take) for _ in range(others)]
    try:
        take()
    finally:
        wait(waiting)
    for helper in waiting:
        helper.result()
    return results


class _InThreads(torch.autograd.Function):
    """Each piece keeps a graph of its own; backward goes through them in threads again."""

    @staticmethod
    def forward(
        ctx: Any, part: Part, x: Tensor, rows: int, num_threads: int, *parameters: Tensor
    ) -> Tensor:
        device, dtype = x.device.type, torch.get_autocast_dtype(x.device.type)
        autocast = torch.is_autocast_enabled(device)

        def run(piece: Tensor) -> Tensor:
            with torch.enable_grad(), torch.autocast(device, dtype, enabled=autocast):
                return part(piece)

        ctx.outputs = _share_out(
            [partial(run, piece) for piece in torch.split(x, rows)], num_threads
        )
        ctx.parameters, ctx.num_threads = parameters, num_threads
        return torch.cat([output.detach() for output in ctx.outputs])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares = torch.split(grad, [len(output) for output in ctx.outputs])
        tasks = [
            partial(torch.autograd.grad, output, ctx.parameters, share)
            for output, share in zip(ctx.outputs, shares, strict=True)
        ]
        first, *others = _share_out(tasks, ctx.num_threads)
        gradients = list(first)
        for other in others:
            torch._foreach_add_(gradients, list(other))
        ctx.outputs = None
        return None, None, None, None, *gradients
