"""The APPO loss: clipped policy gradient with V-trace or GAE over the steps fresh enough to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives import LossModule

from sf_torchrl.algorithms.advantages import gae, normalize_advantage
from sf_torchrl.algorithms.distributions import ActionDistribution
from sf_torchrl.algorithms.stretches import (
    Stretches,
    cut_into_stretches,
    episode_begins,
    known_state,
)
from sf_torchrl.algorithms.vtrace import bootstrap_positions, fill_next_value, vtrace
from sf_torchrl.config import LossConfig


class ActorCriticLike(Protocol):
    """What the loss needs of a policy; ``ActorCritic`` has it."""

    in_keys: list[NestedKey]
    distribution: ActionDistribution

    def evaluate(self, observations: list[Tensor]) -> tuple[Tensor, Tensor]:
        """``[N, ...]`` observations -> ``[N, num_params]`` parameters and ``[N]`` values."""
        ...


class RecurrentActorCriticLike(ActorCriticLike, Protocol):
    """A policy with a recurrent core, which ``ActorCritic`` may have."""

    def evaluate_rollouts(
        self, observations: list[Tensor], stretches: Stretches, following: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``evaluate``, with the core's state carried along; see ``ActorCriticNetwork``."""
        ...


@dataclass(frozen=True)
class _Pass:
    """One forward pass over a minibatch; all ``[B, T]``."""

    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    next_value: Tensor


class APPOLoss(LossModule):
    """Asynchronous PPO: what Sample Factory trains with, on TorchRL's batches.

    Reads ``[B, T]`` batches whose steps are consecutive: the policy's observations, ``action``,
    ``action_log_prob``, ``state_value`` (value clip and GAE), ``("next", ...)``, and a bool
    ``[B, T]`` ``mask`` where there is one (True = train on it), else ``("collector", "mask")``.
    Masked steps are never looked at: whatever they hold changes no loss and no gradient.

    The value of a next observation is computed only where it is needed: at a rollout's last step,
    where an episode was truncated, and before a masked step.

    Args:
        actor_critic: an ``ActorCritic``, or a module with its ``in_keys``, ``distribution`` and
            ``evaluate``.
        config: coefficients; Sample Factory's by default.

    Raises:
        ValueError: ``actor_critic`` lacks what the loss needs.

    Source: Petrenko et al. 2020, https://arxiv.org/abs/2006.11751; Schulman et al. 2017,
    https://arxiv.org/abs/1707.06347.
    """

    @dataclass
    class _AcceptedKeys:
        action: NestedKey = "action"
        action_log_prob: NestedKey = "action_log_prob"
        state_value: NestedKey = "state_value"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        mask: NestedKey = "mask"
        initial_state: NestedKey = ("collector", "initial_state")
        recurrent_state: NestedKey = "recurrent_state"
        is_init: NestedKey = "is_init"
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"

    tensor_keys: _AcceptedKeys
    out_keys = [  # noqa: RUF012 (TorchRL's convention)
        "loss_objective",
        "loss_critic",
        "loss_entropy",
        "fresh_fraction",
        "entropy",
        "clip_fraction",
        "kl_approx",
        "ratio_deviation_max",
        "value",
        "value_target",
    ]

    def __init__(self, actor_critic: nn.Module, config: LossConfig | None = None) -> None:
        super().__init__()
        missing = [
            n for n in ("in_keys", "distribution", "evaluate") if not hasattr(actor_critic, n)
        ]
        if missing:
            raise ValueError(
                f"APPOLoss needs a policy with {', '.join(missing)}, as ActorCritic has; "
                f"got {type(actor_critic).__name__}"
            )
        self.actor_critic = actor_critic
        self.config = LossConfig() if config is None else config
        self.with_diagnostics = True
        """Whether diagnostics are computed; they cost as much as a tenth of a small network."""

    @property
    def functional(self) -> bool:
        """The parameters are the policy's own, not copies."""
        return False

    @property
    def in_keys(self) -> list[NestedKey]:
        """What is read from a batch."""
        keys = self.tensor_keys
        observations = self.observation_keys
        return [
            *observations,
            keys.action,
            keys.action_log_prob,
            keys.state_value,
            *[_after(key) for key in (*observations, keys.reward, keys.done, keys.terminated)],
            *([keys.initial_state] if self._recurrent else []),
        ]

    @property
    def _recurrent(self) -> bool:
        return getattr(self.actor_critic, "state", None) is not None

    @property
    def observation_keys(self) -> list[NestedKey]:
        """What the policy reads of the env."""
        return list(getattr(self.actor_critic, "observation_keys", self._policy.in_keys))

    @property
    def _policy(self) -> ActorCriticLike:
        return cast(ActorCriticLike, self.actor_critic)

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """Nothing to forward to: advantages are computed here."""

    def forward(self, tensordict: TensorDictBase) -> TensorDict:
        """Losses and diagnostics of a batch or minibatch ``[B, T]``.

        Returns:
            Scalars: ``loss_objective``, ``loss_critic`` and ``loss_entropy`` with gradient, whose
            sum is to be minimized (all 0 where every step is masked); ``fresh_fraction``, the
            share of steps that are unmasked; and, with ``with_diagnostics``, diagnostics without
            gradient, means over unmasked steps.

        Raises:
            ValueError: the batch is not ``[B, T]``.
        """
        _check_rollouts(tensordict)
        mask = self.mask(tensordict)
        if mask is not None and not bool(mask.any()):
            return self._nothing(tensordict)
        seen = self._evaluate(tensordict, mask)
        keys = self.tensor_keys
        log_ratio = self._log_ratio(tensordict, seen, mask)
        advantage, value_target = self._returns(tensordict, seen, log_ratio.detach(), mask)
        if self.config.normalize_advantage:
            advantage = normalize_advantage(advantage, mask)
        old_value = _select(tensordict.get(keys.state_value).reshape(seen.value.shape), mask)
        return self._losses(seen, log_ratio, advantage, value_target, old_value, mask)

    def returns(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``advantage`` and ``value_target``, ``[B, T]``, of a whole batch into it.

        With GAE to be done once a batch, before it is cut into minibatches: the value estimates
        are those of the policy that acted. V-trace is computed anew in every forward pass.
        """
        _check_rollouts(tensordict)
        mask = self.mask(tensordict)
        if mask is not None and not bool(mask.any()):  # the loss will not look at them
            advantage = value_target = torch.zeros(mask.shape, device=mask.device)
            tensordict.set(self.tensor_keys.advantage, advantage)
            return tensordict.set(self.tensor_keys.value_target, value_target)
        with torch.no_grad():
            seen = self._evaluate(tensordict, mask)
            log_ratio = self._log_ratio(tensordict, seen, mask)
            advantage, value_target = self._returns(tensordict, seen, log_ratio, mask)
        tensordict.set(self.tensor_keys.advantage, advantage)
        return tensordict.set(self.tensor_keys.value_target, value_target)

    def _log_ratio(self, batch: TensorDictBase, seen: _Pass, mask: Tensor | None) -> Tensor:
        """``[B, T]`` log pi - log mu, 0 at masked steps."""
        behaviour = batch.get(self.tensor_keys.action_log_prob).reshape(batch.batch_size)
        return _select(seen.log_prob - behaviour, mask)

    def mask(self, batch: TensorDictBase) -> Tensor | None:
        """``[B, T]`` bool; None where every step counts."""
        mask = batch.get(self.tensor_keys.mask, None)
        if mask is None:
            mask = batch.get(("collector", "mask"), None)
        if mask is None:
            return None
        mask = mask.reshape(batch.batch_size)
        if bool(mask.all()):
            return None
        return known_state(mask, self._begins(batch, mask)) if self._recurrent else mask

    def _begins(self, batch: TensorDictBase, mask: Tensor | None) -> Tensor:
        """``[B, T]`` bool: an episode begins."""
        is_init = batch.get(self.tensor_keys.is_init, None)
        if is_init is not None:
            is_init = is_init.reshape(batch.batch_size)
        return episode_begins(is_init, self._flag(batch, self.tensor_keys.done), mask)

    def _evaluate(self, batch: TensorDictBase, mask: Tensor | None) -> _Pass:
        """Run the policy once over unmasked steps and the next observations that are needed."""
        keys, policy = self.tensor_keys, self._policy
        done, terminated = self._flag(batch, keys.done), self._flag(batch, keys.terminated)
        needed = bootstrap_positions(done, terminated, mask)
        rows = []
        for key in self.observation_keys:
            observation, following = batch.get(key), batch.get(_after(key))
            steps = observation.flatten(0, 1) if mask is None else observation[mask]
            rows.append(torch.cat([steps, following[needed]]))
        if self._recurrent:
            params, value = self._evaluate_rollouts(batch, rows, needed, mask)
        else:
            params, value = policy.evaluate(rows)
        count = len(steps)
        action = batch.get(keys.action)
        action = action.flatten(0, 1) if mask is None else action[mask]
        action = action.reshape(count, *policy.distribution.action_shape)
        log_prob, entropy = policy.distribution.log_prob_and_entropy(params[:count], action)
        step_value = _spread(value[:count], done.shape, mask)
        return _Pass(
            log_prob=_spread(log_prob, done.shape, mask),
            entropy=_spread(entropy, done.shape, mask),
            value=step_value,
            next_value=fill_next_value(
                step_value.detach(), value[count:].detach(), needed, terminated
            ),
        )

    def _evaluate_rollouts(
        self, batch: TensorDictBase, rows: list[Tensor], needed: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the core over every rollout, from the state in which it began."""
        begins = self._begins(batch, mask)
        stretches = cut_into_stretches(begins, mask)
        state = batch.get(self.tensor_keys.initial_state, None)
        if state is None:  # another collector's batch has the state before every step
            state = batch.get(self.tensor_keys.recurrent_state, None)
        if state is None:
            keys = self.tensor_keys
            raise ValueError(
                f"the policy is recurrent and the batch has neither {keys.initial_state} nor "
                f"{keys.recurrent_state!r}, the state in which rollouts begin"
            )
        state = torch.where(begins[:, :1], 0.0, state[:, 0])
        # Each observation that is needed followed the end of a stretch.
        ends = needed.flatten() if mask is None else needed[mask]
        policy = cast(RecurrentActorCriticLike, self.actor_critic)
        return policy.evaluate_rollouts(rows, stretches, stretches.of_row[ends], state)

    def _flag(self, batch: TensorDictBase, key: NestedKey) -> Tensor:
        return batch.get(_after(key)).reshape(batch.batch_size)  # type: ignore[no-any-return]

    def _returns(
        self, batch: TensorDictBase, seen: _Pass, log_ratio: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Advantage and value target, ``[B, T]``, without gradient."""
        keys, config = self.tensor_keys, self.config
        if not config.with_vtrace:
            advantage = batch.get(keys.advantage, None)
            if advantage is not None:
                # TorchRL's estimators write [B, T, 1], which would broadcast.
                value_target = batch.get(keys.value_target)
                return (
                    _select(advantage.reshape(batch.batch_size), mask),
                    _select(value_target.reshape(batch.batch_size), mask),
                )
        reward = batch.get(_after(keys.reward)).reshape(batch.batch_size)
        reward = (reward * config.reward_scale).clamp(-config.reward_clip, config.reward_clip)
        done, terminated = self._flag(batch, keys.done), self._flag(batch, keys.terminated)
        if config.with_vtrace:
            found = vtrace(
                log_ratio,
                seen.value.detach(),
                seen.next_value,
                reward,
                done,
                terminated,
                gamma=config.gamma,
                rho_clip=config.vtrace_rho,
                c_clip=config.vtrace_c,
                mask=mask,
                bootstrap=cast(Any, config.vtrace_bootstrap),
            )
            return found.advantage, found.value_target
        value = batch.get(keys.state_value).reshape(batch.batch_size)
        estimated = gae(
            value,
            seen.next_value,
            reward,
            done,
            terminated,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            mask=mask,
        )
        return estimated.advantage, estimated.value_target

    def _losses(
        self,
        seen: _Pass,
        log_ratio: Tensor,
        advantage: Tensor,
        value_target: Tensor,
        old_value: Tensor,
        mask: Tensor | None,
    ) -> TensorDict:
        config = self.config
        count = seen.value.numel() if mask is None else int(mask.sum())

        def mean(x: Tensor) -> Tensor:
            return x.mean() if mask is None else _select(x, mask).sum() / count

        ratio = log_ratio.exp()
        high = 1.0 + config.ppo_clip_ratio
        clipped = ratio.clamp(1.0 / high, high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        limit = config.ppo_clip_value
        near = old_value + (seen.value - old_value).clamp(-limit, limit)
        value_loss = torch.maximum(
            (seen.value - value_target).square(), (near - value_target).square()
        )
        entropy = mean(seen.entropy)
        found = {
            "loss_objective": -mean(gain),
            "loss_critic": config.value_loss_coeff * mean(value_loss),
            "loss_entropy": -config.exploration_loss_coeff * entropy,
            "fresh_fraction": torch.tensor(count / seen.value.numel()),
        }
        if self.with_diagnostics:
            with torch.no_grad():
                found |= {
                    "entropy": entropy.detach(),
                    "clip_fraction": mean((clipped != ratio).float()),
                    # Schulman's estimator of KL(behaviour || target), never negative.
                    "kl_approx": mean(ratio - 1.0 - log_ratio),
                    "ratio_deviation_max": _select(ratio - 1.0, mask).abs().max(),
                    "value": mean(seen.value),
                    "value_target": mean(value_target),
                }
        return TensorDict(found, batch_size=[])

    def _nothing(self, batch: TensorDictBase) -> TensorDict:
        zero = torch.zeros((), device=batch.device)
        return TensorDict({key: zero.clone() for key in self.out_keys}, batch_size=[])


def _check_rollouts(batch: TensorDictBase) -> None:
    if batch.batch_dims != 2:
        raise ValueError(
            f"APPOLoss reads batches of rollouts [B, T], got batch size {list(batch.batch_size)}; "
            "one env alone: batch.unsqueeze(0)"
        )


def _after(key: NestedKey) -> NestedKey:
    return ("next", key) if isinstance(key, str) else ("next", *key)


def _select(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` with zeros at masked steps, by selection: zero times NaN would be NaN."""
    return x if mask is None else torch.where(mask, x, 0.0)


def _spread(values: Tensor, shape: torch.Size, mask: Tensor | None) -> Tensor:
    """``[N]`` values of unmasked steps -> ``[B, T]``, 0 at masked ones."""
    if mask is None:
        return values.view(shape)
    return values.new_zeros(shape).masked_scatter(mask, values)
