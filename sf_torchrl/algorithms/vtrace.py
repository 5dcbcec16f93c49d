"""V-trace, and what every estimator over ``[B, T]`` rollouts shares with it.

``B`` is the number of rollouts, ``T`` the steps in each. A rollout may hold several
episodes, and steps that are not to be trained on (``mask`` False). Both cut it into
stretches: the recursion runs inside a stretch and never leaves it. A stretch that ended
in a terminal state is followed by the value zero, any other by ``next_value`` of its last
step: the value of the true next observation, taken *before* any reset.

Inside a stretch the next observation of step t is the observation of step t + 1, so its
value is ``value[:, t + 1]`` and ``next_value`` is not read. :func:`bootstrap_positions`
says where it is.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class VTraceReturns(NamedTuple):
    """Regression target and policy-gradient weight for every step of a rollout."""

    value_target: Tensor  # [B, T]  v_s; 0 where masked
    advantage: Tensor  # [B, T]  rho_s (r_s + gamma v_{s+1} - V(x_s)); 0 where masked


@torch.no_grad()
def vtrace(  # noqa: PLR0913
    log_ratio: Tensor,
    value: Tensor,
    next_value: Tensor,
    reward: Tensor,
    done: Tensor,
    terminated: Tensor,
    *,
    gamma: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    mask: Tensor | None = None,
    bootstrap: Literal["next_value", "sample_factory"] = "next_value",
) -> VTraceReturns:
    """Off-policy value targets and advantages for a batch of rollouts.

    Whatever a masked step holds (NaN and infinities included) changes no unmasked output
    by one bit. The same is true of ``next_value`` outside :func:`bootstrap_positions`.

    Args:
        log_ratio: ``[B, T]`` log pi(a|s) - log mu(a|s); pi is the policy being trained,
            mu the one that acted. Float32 or float64, as are the next three; all the same.
        value: ``[B, T]`` V(s_t), in undiscounted reward units.
        next_value: ``[B, T]`` V of the observation that followed step t, taken *before*
            any reset.
        reward: ``[B, T]`` reward of step t.
        done: ``[B, T]`` bool, the episode ended at step t for any reason.
        terminated: ``[B, T]`` bool, it ended in a terminal state.
        gamma: discount per environment step, in [0, 1].
        rho_clip: cap on the ratio in the temporal difference (rho-bar).
        c_clip: cap on the ratio in the trace (c-bar); the paper assumes it is at most
            ``rho_clip``.
        mask: ``[B, T]`` bool, True = train on it. None = train on every step.
        bootstrap: ``"next_value"`` is the published algorithm. ``"sample_factory"`` takes
            (V(s) - r) / gamma of the last step of a rollout, where that step did not end
            an episode, for the value that follows it. Its advantage is then zero whatever
            the action was: a defect, here only to compare with Sample Factory. That
            library also clamps the ratio to [0.05, 20]: the caller's business.

    Returns:
        :class:`VTraceReturns`, ``[B, T]``, in the dtype of the input and without gradient.
        The advantage carries the factor rho already.

    Raises:
        ValueError: if the tensors do not share one 2-D shape, the numbers one dtype (float32
            or float64), if a flag is not bool, ``gamma`` is outside [0, 1] or ``bootstrap``
            unknown.

    Source: Espeholt et al. 2018, https://arxiv.org/abs/1802.01561: v_s is equation 1 of
    section 4.1, computed as in its remark 1; the advantage is the policy gradient's weight
    in the actor-critic algorithm of section 4.2.
    """
    check_rollouts((log_ratio, value, next_value, reward), (done, terminated, mask), gamma)
    if bootstrap not in ("next_value", "sample_factory"):
        raise ValueError(f"bootstrap is 'next_value' or 'sample_factory', got {bootstrap!r}")

    goes_on = recursion_goes_on(done, terminated, mask)
    following = following_value(value, next_value, terminated, goes_on)
    if bootstrap == "sample_factory":
        following = _sample_factory_start(following, value, reward, done | terminated, gamma)

    ratio = log_ratio.exp()
    rho = ratio.clamp(max=rho_clip)
    delta = rho * (reward + gamma * following - value)
    trace = gamma * ratio.clamp(max=c_clip)
    value_target = value + backward_recursion(delta, trace, goes_on, mask)

    following_target = torch.where(goes_on, value_target.roll(-1, 1), following)
    advantage = rho * (reward + gamma * following_target - value)
    if mask is not None:
        value_target = torch.where(mask, value_target, 0.0)
        advantage = torch.where(mask, advantage, 0.0)
    return VTraceReturns(value_target, advantage)


def bootstrap_positions(done: Tensor, terminated: Tensor, mask: Tensor | None = None) -> Tensor:
    """``[B, T]`` bool: the steps whose ``next_value`` is read, so must be computed.

    An unmasked step that did not terminate, and that is the last of its rollout, or
    truncated, or followed by a masked step.

    Args:
        done: ``[B, T]`` bool, the episode ended at step t for any reason.
        terminated: ``[B, T]`` bool, it ended in a terminal state.
        mask: ``[B, T]`` bool, True = train on it. None = train on every step.
    """
    needed = ~(recursion_goes_on(done, terminated, mask) | terminated)
    return needed if mask is None else needed & mask


@torch.no_grad()
def fill_next_value(
    value: Tensor, bootstrap_value: Tensor, positions: Tensor, terminated: Tensor
) -> Tensor:
    """A complete ``next_value`` from the few that had to be computed.

    Args:
        value: ``[B, T]`` V(s_t).
        bootstrap_value: ``[N]`` V of the observation that followed each True step of
            ``positions``, in row-major order: that of ``next_observation[positions]``.
        positions: ``[B, T]`` bool with N True, from :func:`bootstrap_positions`.
        terminated: ``[B, T]`` bool, the episode ended in a terminal state at step t.

    Returns:
        ``[B, T]`` without gradient: ``bootstrap_value`` at ``positions``; elsewhere 0 at
        terminated and last steps, and V(s_{t+1}) otherwise.

    Raises:
        ValueError: if ``bootstrap_value`` is not ``[N]``, or the others not of one 2-D shape.
    """
    check_rollouts((value,), (positions, terminated))
    count = int(torch.count_nonzero(positions))
    if bootstrap_value.shape != (count,):
        raise ValueError(
            f"bootstrap_value must be [{count}], one for each of the positions, "
            f"got {list(bootstrap_value.shape)}"
        )
    next_value = value.roll(-1, 1)
    next_value[:, -1:] = 0.0
    next_value.masked_fill_(terminated, 0.0)
    return next_value.masked_scatter_(positions, bootstrap_value.to(value.dtype))


def check_rollouts(
    numbers: Sequence[Tensor], flags: Sequence[Tensor | None], *fractions: float
) -> None:
    """Refuse what would broadcast, lose precision or discount wrongly without a word.

    Args:
        numbers: tensors that must be ``[B, T]``, all float32 or all float64.
        flags: tensors that must be ``[B, T]`` and bool; None is skipped.
        *fractions: numbers that must be in [0, 1].

    Raises:
        ValueError: with what was received.
    """
    present = [flag for flag in flags if flag is not None]
    shapes = [tuple(tensor.shape) for tensor in (*numbers, *present)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2:
        raise ValueError(f"rollouts need one shape [B, T], got {shapes}")
    dtypes = [tensor.dtype for tensor in numbers]
    if len(set(dtypes)) != 1 or dtypes[0] not in (torch.float32, torch.float64):
        raise ValueError(f"rollouts need float32 throughout, or float64, got {dtypes}")
    if any(flag.dtype != torch.bool for flag in present):
        raise ValueError(f"flags must be bool, got {[flag.dtype for flag in present]}")
    if not all(0.0 <= fraction <= 1.0 for fraction in fractions):
        raise ValueError(f"discounts must be in [0, 1], got {fractions}")


def recursion_goes_on(done: Tensor, terminated: Tensor, mask: Tensor | None) -> Tensor:
    """``[B, T]`` bool: steps t and t + 1 are both trained on and of one episode and rollout."""
    goes_on = ~(done | terminated)
    goes_on[:, -1:] = False
    if mask is not None:
        goes_on &= mask
        goes_on[:, :-1] &= mask[:, 1:]
    return goes_on


def following_value(
    value: Tensor, next_value: Tensor, terminated: Tensor, goes_on: Tensor
) -> Tensor:
    """``[B, T]`` V(s_{t+1}): 0 after a terminal state, ``next_value`` at the other cuts."""
    # The last column, where roll wraps around, is never selected: goes_on is False there.
    return torch.where(goes_on, value.roll(-1, 1), next_value).masked_fill_(terminated, 0.0)


def backward_recursion(
    delta: Tensor, trace: Tensor, goes_on: Tensor, mask: Tensor | None
) -> Tensor:
    """``[B, T]`` x_t = delta_t + trace_t x_{t+1}, where the trace is cut unless it goes on.

    Selecting instead of multiplying by zero keeps NaN in masked steps from spreading.
    """
    if mask is not None:
        delta = torch.where(mask, delta, 0.0)
    # Time-major, so that each of the T operations reads and writes contiguous memory.
    result = delta.t().clone(memory_format=torch.contiguous_format)
    steps = result.unbind(0)
    traces = torch.where(goes_on, trace, 0.0).t().contiguous().unbind(0)
    for t in range(len(steps) - 2, -1, -1):
        steps[t].addcmul_(traces[t], steps[t + 1])
    return result.t()


def _sample_factory_start(
    following: Tensor, value: Tensor, reward: Tensor, ended: Tensor, gamma: float
) -> Tensor:
    """``following`` with Sample Factory's stand-in at the last step of each rollout."""
    if gamma == 0.0:
        raise ValueError("bootstrap='sample_factory' divides by gamma, got gamma=0")
    following = following.clone()
    stand_in = (value[:, -1:] - reward[:, -1:]) / gamma
    following[:, -1:] = torch.where(ended[:, -1:], following[:, -1:], stand_in)
    return following
