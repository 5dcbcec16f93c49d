"""Rollouts as consecutive stretches of one episode, packed for a recurrent network.

A stretch begins at a rollout's first step or where an episode begins, and ends at an episode's end,
before a masked step or at the rollout's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stretches:
    """All stretches of a batch, longest first, as ``torch.nn.utils.rnn.PackedSequence`` wants them.

    ``N`` is the number of unmasked steps, in row-major order the rows of a batch; ``S`` the number
    of stretches.
    """

    order: Tensor
    """``[N]`` the row of each packed element."""
    positions: Tensor
    """``[N]`` the packed element of each row."""
    batch_sizes: Tensor
    """``[longest]`` how many stretches have so many steps; on the CPU."""
    of_row: Tensor
    """``[N]`` the stretch of each row."""
    rollout: Tensor
    """``[S]`` the rollout each lies in."""
    begins_rollout: Tensor
    """``[S]`` bool, it begins with the rollout: not with an episode, unless both do."""


def episode_begins(is_init: Tensor | None, done: Tensor, mask: Tensor | None) -> Tensor:
    """``[B, T]`` bool: the step is the first of its episode, as far as the rollout tells.

    Args:
        is_init: ``[B, T]`` bool, as TorchRL's InitTracker writes it; None where the batch has none.
        done: ``[B, T]`` bool, the episode ended at the step.
        mask: ``[B, T]`` bool, True = looked at. None = all are.
    """
    if is_init is not None:
        return is_init
    ended = done if mask is None else done & mask
    return torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1)


def known_state(mask: Tensor, begins: Tensor) -> Tensor:
    """``mask`` without the steps whose recurrent state cannot be known.

    What a masked step holds is never looked at, so the state after it is unknown until an episode
    begins. (Sample Factory goes on from zeros there, in the middle of an episode.)

    Args:
        mask: ``[B, T]`` bool, True = train on it.
        begins: ``[B, T]`` bool, an episode begins.
    """
    known = mask.clone()
    for t in range(1, mask.shape[1]):
        known[:, t] &= known[:, t - 1] | begins[:, t]
    return known


def cut_into_stretches(begins: Tensor, mask: Tensor | None) -> Stretches:
    """Where a recurrent network starts and stops in a batch of rollouts.

    Args:
        begins: ``[B, T]`` bool, an episode begins.
        mask: ``[B, T]`` bool, True = looked at, of :func:`known_state`. None = all are.
    """
    steps = begins.shape[1]
    first = begins.clone()
    first[:, 0] = True
    if mask is None:
        rows = torch.arange(begins.numel(), device=begins.device)
        starts = first.flatten()
    else:
        rows = mask.flatten().nonzero().squeeze(1)
        starts = first[mask]
    stretch = starts.cumsum(0) - 1
    start_row = starts.nonzero().squeeze(1)
    offset = torch.arange(len(rows), device=rows.device) - start_row[stretch]
    longest_first = torch.bincount(stretch, minlength=len(start_row)).argsort(
        descending=True, stable=True
    )
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(len(rank), device=rank.device)
    of_row = rank[stretch]
    order = (offset * len(rank) + of_row).argsort()
    positions = torch.empty_like(order)
    positions[order] = torch.arange(len(order), device=order.device)
    first_step = rows[start_row][longest_first]
    return Stretches(
        order=order,
        positions=positions,
        batch_sizes=torch.bincount(offset).cpu(),
        of_row=of_row,
        rollout=first_step // steps,
        begins_rollout=first_step % steps == 0,
    )
