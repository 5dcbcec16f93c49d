"""The APPO loss, checked against the formulas of its papers written out in float64 NumPy."""

import copy
import dataclasses
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rollout_cases import stretches
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv

from sf_torchrl.algorithms.distributions import Categorical
from sf_torchrl.algorithms.loss import APPOLoss
from sf_torchrl.collector import SharedMemoryCollector
from sf_torchrl.config import LossConfig
from sf_torchrl.models.actor_critic import ActorCritic

LOSSES = ("loss_objective", "loss_critic", "loss_entropy")
NAN = float("nan")
GARBAGE = [NAN, float("inf"), -float("inf"), 1e30]
DOUBLE = torch.float64


class Table(nn.Module):
    """A policy that looks up logits and value by the number that is its observation."""

    in_keys = ("observation",)

    def __init__(self, num_states, num_actions=3, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.distribution = Categorical(num_actions)
        self.logits = nn.Parameter(torch.randn(num_states, num_actions, generator=g, dtype=DOUBLE))
        self.values = nn.Parameter(torch.randn(num_states, generator=g, dtype=DOUBLE))
        self.seen = []

    def evaluate(self, observations):
        (states,) = observations
        states = states.squeeze(-1).long()
        self.seen = states.tolist()
        return self.logits[states], self.values[states]


def table_batch(policy, B=4, T=6, seed=0, mask=None, dtype=DOUBLE):
    """Random rollouts over states that all differ, next ones included: 2i is followed by 2i + 1.

    The acting policy is another one, far enough away that ratios straddle the clips.
    """
    g = torch.Generator().manual_seed(100 + seed)
    state = 2 * torch.arange(B * T).view(B, T, 1)
    done = torch.rand(B, T, 1, generator=g) < 0.25
    terminated = done & (torch.rand(B, T, 1, generator=g) < 0.5)
    action = torch.randint(policy.distribution.n, (B, T), generator=g)
    log_probs = policy.logits.detach()[state.squeeze(-1)].log_softmax(-1)
    log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    old_value = policy.values.detach()[state]
    batch = {
        "observation": state.to(dtype),
        "action": action,
        "action_log_prob": log_prob + 0.3 * torch.randn(B, T, generator=g, dtype=dtype),
        "state_value": old_value + torch.randn(B, T, 1, generator=g, dtype=dtype),
        "done": torch.zeros_like(done),
        "terminated": torch.zeros_like(done),
        "truncated": torch.zeros_like(done),
        "next": {
            "observation": (state + 1).to(dtype),
            "reward": 2 * torch.randn(B, T, 1, generator=g, dtype=dtype),
            "done": done,
            "terminated": terminated,
            "truncated": done & ~terminated,
        },
    }
    if mask is not None:
        batch["mask"] = mask
    return TensorDict(batch, batch_size=[B, T], names=[None, "time"])


def table_case(B=4, T=6, seed=0, mask=None):
    policy = Table(2 * B * T, seed=seed)
    return policy, table_batch(policy, B, T, seed, mask)


def some_mask(B=4, T=6, seed=0, share=0.7):
    return torch.rand(B, T, generator=torch.Generator().manual_seed(1000 + seed)) < share


def vtrace_of_stretch(V, V_last, reward, ratio, c):
    """Equation 1 of Espeholt et al. as written, and the advantage of their section 4.2."""
    rho, trace = np.minimum(ratio, c.vtrace_rho), np.minimum(ratio, c.vtrace_c)
    V_next = np.append(V[1:], V_last)
    delta = rho * (reward + c.gamma * V_next - V)
    target = np.array(
        [
            V[s] + sum(np.prod(c.gamma * trace[s:t]) * delta[t] for t in range(s, len(V)))
            for s in range(len(V))
        ]
    )
    return target, rho * (reward + c.gamma * np.append(target[1:], V_last) - V)


def gae_of_stretch(old_V, V_last, reward, c):
    """Equation 16 of Schulman et al. 2016 as written."""
    delta = reward + c.gamma * np.append(old_V[1:], V_last) - old_V
    decay = c.gamma * c.gae_lambda
    advantage = [
        sum(decay ** (t - s) * delta[t] for t in range(s, len(delta))) for s in range(len(delta))
    ]
    return np.array(advantage) + old_V, np.array(advantage)


def paper(policy, batch, config):
    """Everything the loss returns, and target and advantage of each step, in plain NumPy."""
    c = config
    logits, values = policy.logits.detach().numpy(), policy.values.detach().numpy()
    state = batch["observation"].squeeze(-1).long().numpy()
    next_state = batch["next", "observation"].squeeze(-1).long().numpy()
    done = batch["next", "done"].squeeze(-1).numpy()
    terminated = batch["next", "terminated"].squeeze(-1).numpy()
    mask = batch.get("mask", torch.ones(state.shape, dtype=torch.bool)).numpy()
    reward = batch["next", "reward"].squeeze(-1).numpy() * c.reward_scale
    reward = np.clip(reward, -c.reward_clip, c.reward_clip)
    old_V = batch["state_value"].squeeze(-1).numpy()

    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    entropy = -(np.exp(log_p) * log_p).sum(-1)[state]
    log_pi = log_p[state, batch["action"].numpy()]
    ratio = np.exp(log_pi - batch["action_log_prob"].numpy())
    V = values[state]

    target, advantage = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(len(mask)):
        for s in stretches(done[b], mask[b]):
            last = s.stop - 1
            V_last = 0.0 if terminated[b, last] else values[next_state[b, last]]
            if c.with_vtrace:
                found = vtrace_of_stretch(V[b, s], V_last, reward[b, s], ratio[b, s], c)
            else:
                found = gae_of_stretch(old_V[b, s], V_last, reward[b, s], c)
            target[b, s], advantage[b, s] = found

    normal = advantage[mask]
    if c.normalize_advantage:
        deviation = normal.std(ddof=1) if mask.sum() > 1 else 0.0
        normal = (normal - normal.mean()) / max(deviation, 1e-7)
    ratio, y, v, v_old = ratio[mask], target[mask], V[mask], old_V[mask]
    low, high = 1 / (1 + c.ppo_clip_ratio), 1 + c.ppo_clip_ratio
    clipped = np.clip(ratio, low, high)
    near = v_old + np.clip(v - v_old, -c.ppo_clip_value, c.ppo_clip_value)
    return {
        "loss_objective": -np.mean(np.minimum(ratio * normal, clipped * normal)),
        "loss_critic": c.value_loss_coeff * np.mean(np.maximum((v - y) ** 2, (near - y) ** 2)),
        "loss_entropy": -c.exploration_loss_coeff * np.mean(entropy[mask]),
        "fresh_fraction": mask.mean(),
        "entropy": np.mean(entropy[mask]),
        "clip_fraction": np.mean((ratio < low) | (ratio > high)),
        "kl_approx": np.mean(ratio - 1 - np.log(ratio)),
        "ratio_deviation_max": np.abs(ratio - 1).max(),
        "value": v.mean(),
        "value_target": y.mean(),
    }, (target, advantage)


def gradients(loss, batch, names=LOSSES):
    """Losses and diagnostics of a batch, and the gradients of the sum of ``names``."""
    found = loss(batch)
    loss.actor_critic.zero_grad(set_to_none=True)
    sum(found[name] for name in names).backward()
    return found.detach(), {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in loss.actor_critic.named_parameters()
    }


def assert_same_bits(a, b):
    assert set(a.keys()) == set(b.keys())
    for key in a.keys():  # noqa: SIM118 (a TensorDict iterates over its batch)
        assert torch.equal(a[key], b[key]), key


# What it computes

CONFIGS = {
    "defaults": LossConfig(),
    "gae": LossConfig(with_vtrace=False),
    "narrow clips": LossConfig(
        ppo_clip_ratio=0.02, ppo_clip_value=0.1, vtrace_rho=1.4, vtrace_c=0.8, gamma=0.8
    ),
    "gae, no normalization": LossConfig(
        with_vtrace=False, normalize_advantage=False, gae_lambda=0.5, ppo_clip_ratio=0.3
    ),
    "scaled and clipped rewards": LossConfig(
        reward_scale=0.5, reward_clip=0.4, exploration_loss_coeff=0.7, value_loss_coeff=2.0
    ),
}


@pytest.mark.parametrize("masked", [False, True], ids=["every step", "masked"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_losses_and_diagnostics_are_those_of_the_formulas(config, masked, seed):
    policy, batch = table_case(seed=seed, mask=some_mask(seed=seed) if masked else None)
    want, _ = paper(policy, batch, config)
    loss = APPOLoss(policy, config)
    got = loss(batch)
    assert set(got.keys()) == set(want) == set(loss.out_keys)
    for key, value in want.items():
        tolerance = 1e-6 if "fraction" in key else 1e-12
        assert got[key].item() == pytest.approx(value, rel=tolerance, abs=1e-12)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_returns_writes_target_and_advantage_of_every_step(config):
    policy, batch = table_case(mask=some_mask())
    _, (target, advantage) = paper(policy, batch, config)
    APPOLoss(policy, config).returns(batch)
    torch.testing.assert_close(batch["value_target"], torch.tensor(target))
    torch.testing.assert_close(batch["advantage"], torch.tensor(advantage))


def given(ratio=None, advantage=None, value=None, old_value=None, target=None, logits=None):
    """One rollout whose ratios, values, advantages and targets are as asked."""
    T = len(next(x for x in (ratio, value, logits) if x is not None))
    policy = Table(2 * T)
    batch = table_batch(policy, B=1, T=T)

    def row(x, default):
        return torch.tensor([[default] * T if x is None else x], dtype=DOUBLE)

    with torch.no_grad():
        policy.values[::2] = row(value, 0.0)[0]
        policy.logits.zero_()
        if logits is not None:
            policy.logits[::2] = torch.tensor(logits, dtype=DOUBLE)
    log_prob = policy.logits[::2].log_softmax(-1).gather(-1, batch["action"].T).T
    batch["action_log_prob"] = (log_prob - row(ratio, 1.0).log()).detach()
    batch["state_value"] = row(old_value, 0.0).unsqueeze(-1)
    batch["advantage"], batch["value_target"] = row(advantage, 0.0), row(target, 0.0)
    return policy, batch


@pytest.mark.parametrize(
    ("advantage", "loss"), [([1, -1, 1, -1], 0.225), ([-1, 1, -1, 1], -0.02272727)]
)
def test_policy_loss_has_sample_factory_numbers(advantage, loss):
    policy, batch = given(ratio=[0.5, 0.95, 1.05, 1.5], advantage=advantage)
    config = LossConfig(with_vtrace=False, normalize_advantage=False, ppo_clip_ratio=0.1)
    assert APPOLoss(policy, config)(batch)["loss_objective"].item() == pytest.approx(loss, rel=1e-6)


def test_value_loss_has_sample_factory_numbers():
    policy, batch = given(value=[0.5, 2.0, -3.0], old_value=[0, 0, 0], target=[1, 1, 1])
    config = LossConfig(with_vtrace=False, ppo_clip_value=1.0, value_loss_coeff=0.5)
    assert APPOLoss(policy, config)(batch)["loss_critic"].item() == pytest.approx(2.875)


def test_entropy_has_sample_factory_numbers():
    policy, batch = given(logits=[[0, 1, 2], [0, 1, 2]])
    found = APPOLoss(policy, LossConfig(exploration_loss_coeff=0.5))(batch)
    assert found["entropy"].item() == pytest.approx(0.8323955818)
    assert found["loss_entropy"].item() == pytest.approx(-0.5 * 0.8323955818)


def test_advantages_are_normalized_over_unmasked_steps_as_in_sample_factory():
    policy, batch = given(ratio=[1.05, 1.05, 1.05, 1.05], advantage=[1, 2, 3, 10])
    batch["mask"] = torch.tensor([[True, True, True, False]])
    with torch.no_grad():
        policy.values.zero_()
    found = APPOLoss(policy, LossConfig(with_vtrace=False))(batch)
    assert found["loss_objective"].item() == pytest.approx(0.0, abs=1e-12)  # -1, 0, 1
    batch["action_log_prob"] -= torch.tensor([[0.0, 0.0, 0.02, 0.0]]).double()
    found = APPOLoss(policy, LossConfig(with_vtrace=False))(batch)
    assert found["loss_objective"].item() == pytest.approx(-1.05 * (math.exp(0.02) - 1) / 3)


def test_sample_factory_bootstrap_has_its_numbers():
    policy, batch = given(ratio=[1, 1, 1, 1], value=[0.5, 0.4, 0.3, 0.2])
    batch["next", "reward"] = torch.tensor([1.0, 0.0, 2.0, 1.0]).double().view(1, 4, 1)
    for flag in ("done", "terminated"):
        batch["next", flag] = torch.zeros(1, 4, 1, dtype=torch.bool)
    config = LossConfig(vtrace_bootstrap="sample_factory", normalize_advantage=False)
    found = APPOLoss(policy, config)(batch)
    assert found["value_target"].item() == pytest.approx((3.15425980 + 2.17602 + 2.198 + 0.2) / 4)
    assert found["loss_objective"].item() == pytest.approx(-(2.65425980 + 1.77602 + 1.898) / 4)


# Gradients


@pytest.mark.parametrize("masked", [False, True], ids=["every step", "masked"])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_of_each_loss_is_its_slope(name, masked):
    """Central differences in float64; targets and advantages are constants of the loss."""
    policy, batch = table_case(B=2, T=3, seed=3, mask=some_mask(2, 3, 1) if masked else None)
    loss = APPOLoss(policy, LossConfig(with_vtrace=False, exploration_loss_coeff=0.1))
    loss.returns(batch)
    _, got = gradients(loss, batch, [name])
    h = 1e-6
    for parameter, gradient in zip(policy.parameters(), got.values(), strict=True):
        flat = parameter.detach().view(-1)
        slope = torch.zeros_like(flat)
        for i in range(len(flat)):
            ends = []
            for step in (h, -h):
                flat[i] += step
                ends.append(loss(batch)[name].item())
                flat[i] -= step
            slope[i] = (ends[0] - ends[1]) / (2 * h)
        torch.testing.assert_close(gradient.view(-1), slope, rtol=1e-6, atol=1e-8)
    assert any(gradient.any() for gradient in got.values())


def test_vtrace_targets_and_advantages_are_constants_of_the_gradient():
    policy, batch = table_case(mask=some_mask())
    loss = APPOLoss(policy, LossConfig())
    _, with_own = gradients(loss, batch)
    loss.returns(batch)
    fixed = APPOLoss(policy, LossConfig(with_vtrace=False))
    _, with_fixed = gradients(fixed, batch)
    assert_same_bits(with_own, with_fixed)


def test_without_other_losses_the_policy_becomes_uniform():
    policy, batch = table_case(B=1, T=4)
    loss = APPOLoss(policy, LossConfig(exploration_loss_coeff=1.0))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss(batch)["loss_entropy"].backward()
        optimizer.step()
    assert loss(batch)["entropy"].item() == pytest.approx(math.log(3), abs=1e-3)


def test_diagnostics_carry_no_gradient_and_can_be_left_out():
    policy, batch = table_case()
    loss = APPOLoss(policy)
    found = loss(batch)
    assert {key for key in found.keys() if found[key].requires_grad} == set(LOSSES)  # noqa: SIM118
    loss.with_diagnostics = False
    assert set(loss(batch).keys()) == {*LOSSES, "fresh_fraction"}


# Masked steps

ACTOR_CRITICS = {
    "normalized": {"encoder_mlp_layers": (16,)},
    "plain": {"encoder_mlp_layers": (16,), "normalize_input": False},
    "two towers": {"encoder_mlp_layers": (16,), "actor_critic_share_weights": False},
    "gru": {"encoder_mlp_layers": (16,), "core": "gru", "rnn_size": 8},
    "lstm, two towers": {
        "encoder_mlp_layers": (16,),
        "core": "lstm",
        "rnn_size": 8,
        "rnn_num_layers": 2,
        "actor_critic_share_weights": False,
    },
}


def real_batch(layers, B=8, T=10, env="CartPole-v1"):
    """A batch as collectors yield it, with episode ends, and the policy that acted in it."""
    torch.manual_seed(0)
    policy = ActorCritic.for_env(env, **layers)
    if policy.normalizer.active:
        policy.normalizer.update([0.1 + 0.3 * torch.randn(50, 4)], None)
    collector = SharedMemoryCollector(
        env,
        policy,
        frames_per_batch=B * T,
        num_workers=0,
        num_envs_per_worker=B,
        rollout_length=T,
        seed=0,
    )
    batches = iter(collector)
    batch = [next(batches) for _ in range(3)][-1]
    collector.shutdown()
    assert batch["next", "done"].any()
    return policy, batch


def moved(policy):
    """The policy after some training: ratios are no longer 1."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


def spoiled(batch, mask, garbage):
    """The batch with garbage in every leaf of every masked step."""
    dirty = batch.clone()
    for key in batch.keys(True, True):
        leaf = dirty[key]
        if key in ("mask", ("collector", "mask")):
            continue
        bad = ~mask.view(*mask.shape, *[1] * (leaf.ndim - 2)).expand_as(leaf)
        if leaf.dtype == torch.bool:
            leaf ^= bad
        else:
            leaf[bad] = garbage if leaf.dtype.is_floating_point else -(2**40)
    return dirty


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("mask_key", ["mask", ("collector", "mask")], ids=["mask", "TorchRL's"])
@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
@pytest.mark.parametrize("layers", ACTOR_CRITICS.values(), ids=ACTOR_CRITICS.keys())
def test_nothing_in_a_masked_step_changes_a_bit(layers, with_vtrace, mask_key, garbage):
    policy, batch = real_batch(layers)
    loss = APPOLoss(moved(policy), LossConfig(with_vtrace=with_vtrace))
    mask = some_mask(*batch.batch_size)
    batch[mask_key] = mask
    clean, clean_gradients = gradients(loss, batch)
    dirty, dirty_gradients = gradients(loss, spoiled(batch, mask, garbage))
    assert_same_bits(clean, dirty)
    assert_same_bits(clean_gradients, dirty_gradients)
    assert all(torch.isfinite(value).all() for value in clean_gradients.values())


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("normalize", [True, False])
def test_garbage_in_prepared_returns_of_masked_steps_changes_no_bit(garbage, normalize):
    policy, batch = real_batch(ACTOR_CRITICS["plain"])
    loss = APPOLoss(moved(policy), LossConfig(with_vtrace=False, normalize_advantage=normalize))
    mask = some_mask(*batch.batch_size)
    batch["mask"] = mask
    loss.returns(batch)
    clean, clean_gradients = gradients(loss, batch)
    dirty, dirty_gradients = gradients(loss, spoiled(batch, mask, garbage))
    assert_same_bits(clean, dirty)
    assert_same_bits(clean_gradients, dirty_gradients)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_returns_of_unmasked_steps_do_not_see_masked_ones(garbage):
    policy, batch = real_batch(ACTOR_CRITICS["plain"])
    loss = APPOLoss(moved(policy), LossConfig(with_vtrace=False))
    mask = some_mask(*batch.batch_size)
    batch["mask"] = mask
    dirty = spoiled(batch, mask, garbage)
    for key in ("advantage", "value_target"):
        assert torch.equal(loss.returns(batch)[key], loss.returns(dirty)[key])


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
def test_masked_steps_are_as_if_they_were_not_there(with_vtrace):
    """The unmasked half of the rollouts alone gives the same losses."""
    policy, batch = table_case(B=6, mask=(torch.arange(6) % 2 == 0).view(6, 1).expand(6, 6))
    loss = APPOLoss(policy, LossConfig(with_vtrace=with_vtrace))
    masked, half = loss(batch), loss(batch[::2].exclude("mask"))
    for key in set(loss.out_keys) - {"fresh_fraction"}:
        torch.testing.assert_close(masked[key], half[key])
    assert (masked["fresh_fraction"].item(), half["fresh_fraction"].item()) == (0.5, 1.0)


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
def test_a_batch_of_masked_steps_has_losses_zero_and_no_gradient(with_vtrace):
    policy, batch = real_batch(ACTOR_CRITICS["normalized"])
    batch["mask"] = torch.zeros(batch.batch_size, dtype=torch.bool)
    loss = APPOLoss(policy, LossConfig(with_vtrace=with_vtrace))
    found = loss(spoiled(batch, batch["mask"], NAN))
    assert set(found.keys()) == set(loss.out_keys)
    assert all(value.item() == 0.0 and not value.requires_grad for value in found.values())


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
@pytest.mark.parametrize("where", [(0, 0), (3, 9), (5, 4)])
def test_a_single_unmasked_step_gives_numbers(where, with_vtrace):
    policy, batch = real_batch(ACTOR_CRITICS["normalized"])
    batch["mask"] = torch.zeros(batch.batch_size, dtype=torch.bool)
    batch["mask"][where] = True
    loss = APPOLoss(moved(policy), LossConfig(with_vtrace=with_vtrace))
    found, got = gradients(loss, spoiled(batch, batch["mask"], NAN))
    assert all(torch.isfinite(value) for value in found.values())
    assert all(torch.isfinite(gradient).all() for gradient in got.values())
    assert found["loss_critic"].item() > 0


def test_a_mask_of_true_is_no_mask():
    policy, batch = table_case()
    loss = APPOLoss(policy)
    without, without_gradients = gradients(loss, batch)
    batch["mask"] = torch.ones(batch.batch_size, dtype=torch.bool)
    with_mask, with_gradients = gradients(loss, batch)
    assert_same_bits(without, with_mask)
    assert_same_bits(without_gradients, with_gradients)


# True next states


@pytest.mark.parametrize("masked", [False, True], ids=["every step", "masked"])
@pytest.mark.parametrize("seed", range(3))
def test_the_network_sees_unmasked_steps_and_the_next_states_it_needs(masked, seed):
    mask = some_mask(seed=seed) if masked else torch.ones(4, 6, dtype=torch.bool)
    policy, batch = table_case(seed=seed, mask=mask if masked else None)
    APPOLoss(policy)(batch)
    done, terminated = (batch["next", key].squeeze(-1) for key in ("done", "terminated"))
    steps = [2 * (6 * b + t) for b in range(4) for t in range(6) if mask[b, t]]
    followers = [
        2 * (6 * b + t) + 1
        for b in range(4)
        for t in range(6)
        if mask[b, t] and not terminated[b, t] and (done[b, t] or t == 5 or not mask[b, t + 1])
    ]
    assert sorted(policy.seen) == sorted(steps + followers)


def lookup(values):
    """A critic that knows the value of each state; the policy is uniform over three actions."""
    policy = Table(len(values))
    with torch.no_grad():
        policy.logits.zero_()
        policy.values.copy_(torch.tensor(values, dtype=DOUBLE))
    return policy


def episode(states, next_states, rewards, terminated=(), truncated=()):
    """One rollout of a uniform policy."""
    T = len(states)

    def column(values, dtype=DOUBLE):
        return torch.tensor(values, dtype=dtype).view(1, T, 1)

    def flags(ends):
        return column([t in ends for t in range(T)], torch.bool)

    following = {
        "observation": column(next_states),
        "reward": column(rewards),
        "terminated": flags(terminated),
        "truncated": flags(truncated),
        "done": flags(terminated) | flags(truncated),
    }
    steps = {
        "observation": column(states),
        "action": torch.zeros(1, T, dtype=torch.long),
        "action_log_prob": torch.full((1, T), -math.log(3), dtype=DOUBLE),
        "state_value": torch.zeros(1, T, 1, dtype=DOUBLE),
        "next": following,
    }
    return TensorDict(steps, batch_size=[1, T])


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
@pytest.mark.parametrize(
    ("ends", "targets"),
    [
        # State 5 is what truly followed step 1, state 2 the first of the next episode.
        ({"truncated": [1]}, [1 + 0.5 * (2 + 0.5 * 64), 2 + 0.5 * 64, 4 + 0.5 * 16]),
        ({"terminated": [1]}, [1 + 0.5 * 2, 2, 4 + 0.5 * 16]),
        ({"terminated": [1], "truncated": [1]}, [1 + 0.5 * 2, 2, 4 + 0.5 * 16]),
        ({"terminated": [2]}, [1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4, 4]),
        ({"truncated": [2]}, [1 + 0.5 * (2 + 0.5 * 12), 2 + 0.5 * 12, 4 + 0.5 * 16]),
        ({}, [1 + 0.5 * (2 + 0.5 * 12), 2 + 0.5 * 12, 4 + 0.5 * 16]),
    ],
)
def test_truncation_bootstraps_from_the_true_next_state_and_termination_never(
    ends, targets, with_vtrace
):
    final = 64.0 if 1 in ends.get("truncated", []) and "terminated" not in ends else NAN
    last = NAN if 2 in ends.get("terminated", []) else 16.0
    policy = lookup([0.0, 0.0, 0.0, last, NAN, final])  # NaN where nobody may look
    batch = episode([0, 1, 2], [4, 5, 3], [1, 2, 4], **ends)
    loss = APPOLoss(policy, LossConfig(gamma=0.5, gae_lambda=1.0, with_vtrace=with_vtrace))
    assert loss.returns(batch)["value_target"].tolist() == [targets]


def converged(batch, num_states):
    """Values after many rounds of moving each state's to its target."""
    policy = lookup([0.0] * num_states)
    loss = APPOLoss(policy, LossConfig(gamma=0.9))
    for _ in range(300):
        target = loss.returns(batch)["value_target"]
        with torch.no_grad():
            policy.values[batch["observation"].view(-1).long()] = target.view(-1)
    return policy.values.tolist()


def test_a_time_limit_does_not_shorten_the_return():
    """Reward 1 for ever, cut every five steps: the value is 1 / (1 - gamma) all the same."""
    states = [0, 1, 0, 1, 0]
    batch = episode(states, [1, 0, 1, 0, 1], [1] * 5, truncated=[4])
    assert converged(batch, 2) == pytest.approx([10.0, 10.0])


def test_a_terminal_state_ends_the_return():
    batch = episode(range(5), range(1, 6), [1] * 5, terminated=[4])
    want = [sum(0.9**i for i in range(5 - state)) for state in range(5)]
    assert converged(batch, 6)[:5] == pytest.approx(want)


def test_a_reward_at_the_last_step_of_a_rollout_is_learned_from():
    """Sample Factory's V-trace gives that step no advantage."""
    batch = episode([0, 1, 2, 3], [1, 2, 3, 4], [0, 0, 0, 100])
    loss = APPOLoss(lookup([1.0] * 5), LossConfig(gamma=0.9))
    assert loss.returns(batch)["advantage"][0, -1].item() == pytest.approx(100 + 0.9 - 1)


# Ratios


class Pair(gymnasium.Env):
    """Observations are a dict, one of bytes; actions count from 3; five steps an episode."""

    observation_space = spaces.Dict(
        {
            "far": spaces.Box(-1e3, 1e3, (2, 3), np.float32),
            "near": spaces.Dict({"byte": spaces.Box(0, 255, (4,), np.uint8)}),
        }
    )
    action_space = spaces.Discrete(4, start=3)

    def _observe(self):
        return {
            "far": self.np_random.normal(100, 50, (2, 3)).astype(np.float32),
            "near": {"byte": self.np_random.integers(0, 256, 4, np.uint8)},
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.t += 1
        return self._observe(), float(action), self.t == 5, False, {}


def short_pendulum():
    return gymnasium.make("Pendulum-v1", max_episode_steps=5)


ENVS = {"discrete": "CartPole-v1", "box": short_pendulum, "dict": Pair}


@pytest.mark.parametrize("normalize_input", [True, False], ids=["normalized", "plain"])
@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS.keys())
def test_with_the_weights_that_acted_every_ratio_is_one(env, normalize_input):
    torch.manual_seed(0)
    policy = ActorCritic.for_env(
        env,
        encoder_mlp_layers=(32, 32),
        initial_stddev=3.0,  # beyond the pendulum's bounds
        normalize_input=normalize_input,
    )
    for feature, part in zip(policy.specs.observation, policy.normalizer.parts, strict=True):
        if normalize_input:
            part.update(30 + 20 * torch.randn(100, *feature.shape))
    collector = SharedMemoryCollector(
        env,
        policy,
        frames_per_batch=16 * 12,
        num_workers=0,
        num_envs_per_worker=16,
        num_splits=2,
        rollout_length=12,
        seed=1,
    )
    batches = iter(collector)
    batch = [next(batches) for _ in range(3)][-1]
    collector.shutdown()
    assert batch["next", "done"].any()
    assert batch["next", "done"][:, :-1].any()  # inside a rollout too
    deviation = APPOLoss(policy)(batch)["ratio_deviation_max"].item()
    assert deviation < 1e-5
    assert APPOLoss(moved(policy))(batch)["ratio_deviation_max"].item() > 1e-2


def test_the_old_log_prob_is_the_stored_one():
    policy, batch = table_case()
    batch["action_log_prob"] -= 1.0
    want, _ = paper(policy, batch, LossConfig())
    found = APPOLoss(policy)(batch)
    assert found["ratio_deviation_max"].item() == pytest.approx(want["ratio_deviation_max"])


# Shapes


@pytest.mark.parametrize("key", ["value_target", "advantage"])
def test_every_step_has_its_own_target(key):
    """Targets in another order are another loss: nothing is broadcast to [B, B]."""
    policy, batch = table_case(B=6)
    loss = APPOLoss(policy, LossConfig(with_vtrace=False))
    loss.returns(batch)
    before, _ = gradients(loss, batch)
    for order in (torch.randperm(6), slice(None)), (slice(None), torch.randperm(6)):
        other = batch.clone()
        other[key] = batch[key][order]
        name = "loss_critic" if key == "value_target" else "loss_objective"
        assert not torch.isclose(loss(other)[name], before[name])


def test_the_critic_can_learn_eight_different_targets():
    policy, batch = table_case(B=2, T=4)
    batch["advantage"] = torch.zeros(2, 4).double()
    batch["value_target"] = torch.arange(8.0).double().view(2, 4)
    loss = APPOLoss(policy, LossConfig(with_vtrace=False, ppo_clip_value=100.0))
    optimizer = torch.optim.Adam([policy.values], lr=0.3)
    for _ in range(300):
        optimizer.zero_grad()
        loss(batch)["loss_critic"].backward()
        optimizer.step()
    assert loss(batch)["loss_critic"].item() < 1e-3


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
def test_numbers_may_have_a_last_dimension_of_one_or_none(with_vtrace):
    policy, batch = table_case(mask=some_mask())
    loss = APPOLoss(policy, LossConfig(with_vtrace=with_vtrace))
    flat = batch.clone()
    for key in ("state_value", *[("next", k) for k in ("reward", "done", "terminated")]):
        flat[key] = batch[key].squeeze(-1)
    flat["mask"] = batch["mask"].unsqueeze(-1)
    assert_same_bits(loss(batch), loss(flat))


# GAE, once a batch


def test_minibatches_of_prepared_returns_average_to_the_whole():
    policy, batch = table_case(B=6, mask=some_mask(6, 6) | True)
    config = LossConfig(with_vtrace=False, normalize_advantage=False)
    loss = APPOLoss(policy, config)
    whole, whole_gradients = gradients(loss, batch)
    loss.returns(batch)
    parts = [gradients(loss, part) for part in batch.split(2)]
    for name in LOSSES:
        torch.testing.assert_close(sum(found[name] for found, _ in parts) / 3, whole[name])
    for name, gradient in whole_gradients.items():
        torch.testing.assert_close(sum(got[name] for _, got in parts) / 3, gradient)


def test_prepared_returns_stay_those_of_the_policy_that_acted():
    policy, batch = table_case()
    loss = APPOLoss(policy, LossConfig(with_vtrace=False))
    loss.returns(batch)
    before = loss(batch)["value_target"].item()
    with torch.no_grad():
        policy.values += 1.0
    assert loss(batch)["value_target"].item() == before


def test_vtrace_is_computed_anew_whatever_returns_wrote():
    policy, batch = table_case()
    loss = APPOLoss(policy)
    loss.returns(batch)
    with torch.no_grad():
        policy.values += 1.0
    want, _ = paper(policy, batch, LossConfig())
    assert loss(batch)["value_target"].item() == pytest.approx(want["value_target"])


# With TorchRL


def torchrl_batch(policy, num_envs=3, steps=20):
    def make():
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    collector = Collector(
        SerialEnv(num_envs, make),
        policy,
        frames_per_batch=num_envs * steps,
        total_frames=-1,
        auto_register_policy_transforms=False,
    )
    collector.set_seed(0)
    batches = iter(collector)
    batch = [next(batches).clone() for _ in range(2)][-1]
    collector.shutdown()
    assert batch["next", "done"].any()
    return batch


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
def test_works_on_batches_of_torchrls_own_collector(with_vtrace):
    torch.manual_seed(0)
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(16,))
    batch = torchrl_batch(policy)
    loss = APPOLoss(policy, LossConfig(with_vtrace=with_vtrace))
    found, got = gradients(loss, batch)
    assert found["ratio_deviation_max"].item() < 1e-5
    assert all(torch.isfinite(gradient).all() for gradient in got.values())
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    before = found["loss_critic"].item()
    loss.returns(batch)
    for _ in range(50):
        optimizer.zero_grad()
        sum(v for k, v in loss(batch).items() if k.startswith("loss_")).backward()
        optimizer.step()
    assert loss(batch)["loss_critic"].item() < before


def test_reads_only_the_keys_it_says_it_reads():
    policy, batch = real_batch(ACTOR_CRITICS["plain"])
    loss = APPOLoss(policy)
    assert_same_bits(loss(batch), loss(batch.select(*loss.in_keys)))
    for key in loss.in_keys:
        with pytest.raises((KeyError, AttributeError, TypeError)):
            loss(batch.exclude(key))


def test_keys_can_be_renamed_as_in_every_torchrl_loss():
    policy, batch = table_case()
    want = APPOLoss(policy)(batch)
    loss = APPOLoss(policy)
    loss.set_keys(action="move", reward=("score", "raw"))
    renamed = batch.rename_key_("action", "move")
    renamed["next", "score", "raw"] = renamed["next"].pop("reward")
    assert_same_bits(loss(renamed), want)


def test_a_policy_that_lacks_what_the_loss_needs_is_refused_by_name():
    with pytest.raises(ValueError, match=r"in_keys, distribution, evaluate.*Linear"):
        APPOLoss(nn.Linear(4, 2))


def test_trains_the_policy_it_was_given_and_not_a_copy():
    policy, batch = table_case()
    before = copy.deepcopy(policy.state_dict())
    loss = APPOLoss(policy)
    assert {id(p) for p in loss.parameters()} == {id(p) for p in policy.parameters()}
    gradients(loss, batch)
    torch.optim.SGD(policy.parameters(), lr=1.0).step()
    assert all(not torch.equal(before[name], value) for name, value in policy.state_dict().items())


@pytest.mark.parametrize(
    ("name", "value"),
    [("gamma", 1.5), ("ppo_clip_ratio", 0.0), ("vtrace_rho", -1.0), ("vtrace_bootstrap", "x")],
)
def test_impossible_coefficients_are_refused_with_their_value(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        dataclasses.replace(LossConfig(), **{name: value})


@pytest.mark.parametrize("keys", [["action_log_prob"], ["advantage", "value_target"]])
def test_with_gae_too_nothing_of_last_dimension_one_is_broadcast(keys):
    """B = T, so that [B, T] against [B, T, 1] would go through without a word."""
    policy, batch = table_case(B=6, T=6)
    loss = APPOLoss(policy, LossConfig(with_vtrace=False))
    loss.returns(batch)
    want = loss(batch)
    for key in keys:
        batch[key] = batch[key].unsqueeze(-1)
    assert_same_bits(loss(batch), want)


@pytest.mark.parametrize("method", ["forward", "returns"])
def test_a_batch_that_is_not_of_rollouts_is_refused_with_its_shape(method):
    policy, batch = table_case(B=1, T=6)
    with pytest.raises(ValueError, match=r"\[B, T\], got batch size \[6\]"):
        getattr(APPOLoss(policy), method)(batch[0])


def test_the_policy_acts_in_a_single_env_of_torchrl():
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(16,))
    answer = policy(TensorDict({"observation": torch.zeros(4)}, batch_size=[]))
    assert [tuple(answer[key].shape) for key in policy.out_keys] == [(2,), (), (), (1,)]
