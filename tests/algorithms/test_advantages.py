"""Generalized advantage estimation, checked against the sum in its paper, and normalization."""

import numpy as np
import pytest
import torch
from rollout_cases import assert_same_bits, flags, row, stretches

from sf_torchrl.algorithms.advantages import gae, normalize_advantage
from sf_torchrl.algorithms.vtrace import bootstrap_positions, fill_next_value, vtrace

NUMBERS = ("value", "next_value", "reward")
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]


def rollouts(B=5, T=9, seed=0, dtype=torch.float64, **fixed):
    """Random rollouts: some steps terminate and some truncate."""
    g = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(B, T, generator=g, dtype=dtype) for name in NUMBERS}
    done = torch.rand(B, T, generator=g) < 0.25
    x |= {"done": done, "terminated": done & (torch.rand(B, T, generator=g) < 0.5)}
    return x | fixed


def some_mask(B=5, T=9, seed=0):
    return torch.rand(B, T, generator=torch.Generator().manual_seed(1000 + seed)) < 0.7


def spoiled(x, where, garbage, names=NUMBERS):
    """The same rollouts with garbage where asked, and episode ends turned round there."""
    x = x | {name: torch.where(where, garbage, x[name]) for name in names}
    if names == NUMBERS:
        x |= {name: x[name] ^ where for name in ("done", "terminated")}
    return x


def paper(x, gamma, gae_lambda, mask=None):
    """Sum of (gamma lambda)^l delta_{t+l}, O(T^2), one stretch at a time."""
    x = {name: tensor.numpy() for name, tensor in x.items()}
    mask = np.ones_like(x["done"]) if mask is None else mask.numpy()
    advantage = np.zeros(mask.shape)
    for b in range(len(mask)):
        for s in stretches(x["done"][b], mask[b]):
            reward, ended = x["reward"][b, s], x["terminated"][b, s][-1]
            V = np.append(x["value"][b, s], 0.0 if ended else x["next_value"][b, s][-1])
            delta = reward + gamma * V[1:] - V[:-1]
            for t in range(len(delta)):
                weight = (gamma * gae_lambda) ** np.arange(len(delta) - t)
                advantage[b, s.start + t] = np.sum(weight * delta[t:])
    advantage = torch.tensor(advantage)
    return torch.where(torch.tensor(mask), advantage + torch.tensor(x["value"]), 0.0), advantage


# What it computes


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.9, 0.8), (1.0, 1.0), (0.99, 0.0), (0.0, 0.9)])
def test_advantage_is_the_sum_in_the_paper(seed, gamma, gae_lambda):
    x = rollouts(B=40, seed=seed)
    got = gae(**x, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(tuple(got), paper(x, gamma, gae_lambda))


@pytest.mark.parametrize("seed", range(10))
def test_with_a_mask_every_stretch_of_unmasked_steps_is_on_its_own(seed):
    x, mask = rollouts(B=40, seed=seed), some_mask(B=40, seed=seed)
    got = gae(**x, gamma=0.9, gae_lambda=0.8, mask=mask)
    torch.testing.assert_close(tuple(got), paper(x, 0.9, 0.8, mask))


def test_gives_sample_factory_numbers_where_nothing_is_masked():
    got = gae(
        row(0.5, 0.4, 0.3, 0.2), row(0.4, 0.3, 0.2, 0.1), row(1, 0, 2, 1),
        flags(0, 1, 0, 0), flags(0, 1, 0, 0), gamma=0.99, gae_lambda=0.95,
    )  # fmt: skip
    torch.testing.assert_close(got.advantage, row(0.5198, -0.4, 2.7435095, 0.899))
    torch.testing.assert_close(got.value_target, row(1.0198, 0, 3.0435095, 1.099))


def test_a_masked_step_is_not_bridged_as_sample_factory_does():
    got = gae(
        row(0.5, 0.4, 0.3, 0.2), row(0.4, 0.3, 0.2, 0.1), row(1, 0, 2, 1),
        flags(0, 0, 0, 0), flags(0, 0, 0, 0),
        gamma=0.99, gae_lambda=0.95, mask=flags(1, 0, 1, 1),
    )  # fmt: skip
    # Sample Factory: 3.3596 and 3.0405 for the first two.
    torch.testing.assert_close(got.advantage, row(1 + 0.99 * 0.4 - 0.5, 0, 2.7435095, 0.899))


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_torchrl(seed):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    x = rollouts(B=20, seed=seed)
    needed = bootstrap_positions(x["done"], x["terminated"])
    x["next_value"] = fill_next_value(x["value"], x["next_value"][needed], needed, x["terminated"])
    y = {name: tensor.unsqueeze(-1) for name, tensor in x.items()}
    advantage, target = functional.generalized_advantage_estimate(
        0.9, 0.8, y["value"], y["next_value"], y["reward"], y["done"], y["terminated"]
    )
    got = gae(**x, gamma=0.9, gae_lambda=0.8)
    want = (target.squeeze(-1), advantage.squeeze(-1))
    # TorchRL multiplies its discounts in float32.
    torch.testing.assert_close(tuple(got), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_with_lambda_one_it_is_the_discounted_return_minus_the_value(seed):
    ended = flags(0, 0, 1, 0, 0, 0)
    x = rollouts(B=1, T=6, seed=seed, done=ended, terminated=ended)
    r, last = x["reward"][0], x["next_value"][0, -1]
    first = r[0] + 0.9 * r[1] + 0.81 * r[2]
    second = r[3] + 0.9 * r[4] + 0.81 * r[5] + 0.729 * last
    got = gae(**x, gamma=0.9, gae_lambda=1.0)
    torch.testing.assert_close(got.value_target[0, [0, 3]], torch.stack([first, second]))
    want = torch.stack([first, second]) - x["value"][0, [0, 3]]
    torch.testing.assert_close(got.advantage[0, [0, 3]], want)


def test_with_lambda_zero_it_is_the_temporal_difference():
    x = rollouts(B=1, T=3, done=flags(0, 0, 0), terminated=flags(0, 0, 0))
    V = torch.cat([x["value"], x["next_value"][:, -1:]], 1)
    got = gae(**x, gamma=0.9, gae_lambda=0.0).advantage
    torch.testing.assert_close(got, x["reward"] + 0.9 * V[:, 1:] - V[:, :-1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_with_lambda_one_it_is_v_trace_on_policy(seed, masked):
    x, mask = rollouts(seed=seed), some_mask(seed=seed) if masked else None
    on_policy = vtrace(torch.zeros_like(x["value"]), **x, gamma=0.9, mask=mask)
    got = gae(**x, gamma=0.9, gae_lambda=1.0, mask=mask)
    torch.testing.assert_close(tuple(got), tuple(on_policy))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 1.0])
def test_a_true_value_function_has_no_advantage(gae_lambda):
    ten = torch.full((1, 4), 10.0, dtype=torch.float64)  # reward 1 for ever, gamma 0.9
    x = {"value": ten, "next_value": ten, "reward": ten / 10, "done": flags(0, 1, 0, 0)}
    got = gae(**x, terminated=flags(0, 0, 0, 0), gamma=0.9, gae_lambda=gae_lambda)
    torch.testing.assert_close(got.advantage, 0 * ten)


# Credit and boundaries


def test_a_reward_at_the_last_step_of_a_rollout_gets_credit():
    zero, never = torch.zeros(1, 4).double(), flags(0, 0, 0, 0)
    got = gae(zero, row(9, 9, 9, 0.5), row(0, 0, 0, 1), never, never, gamma=0.9, gae_lambda=0.5)
    torch.testing.assert_close(got.advantage, row(0.45**3, 0.45**2, 0.45, 1) * (1 + 0.9 * 0.5))


def test_truncation_bootstraps_from_the_true_next_observation():
    x = rollouts(B=1, T=2, done=flags(1, 0), terminated=flags(0, 0))
    x |= {"reward": row(1, 7), "value": row(0.4, 7), "next_value": row(0.4, 7)}
    got = gae(**x, gamma=0.99, gae_lambda=0.95).value_target[0, 0]
    torch.testing.assert_close(got.item(), 1.396)


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_termination_never_bootstraps(t, garbage):
    ended = flags(*[i == t for i in range(4)])
    x = rollouts(B=1, T=4, done=ended, terminated=ended)
    got = gae(**x, gamma=0.9, gae_lambda=0.8)
    dirty = spoiled(x, ended, garbage, ["next_value"])
    assert_same_bits(got, gae(**dirty, gamma=0.9, gae_lambda=0.8))
    torch.testing.assert_close(got.advantage[0, t], (x["reward"] - x["value"])[0, t])


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_is_its_trajectories_one_after_another(seed):
    x = rollouts(B=100, seed=seed)
    joined = gae(**x, gamma=0.9, gae_lambda=0.8).advantage
    for b in range(100):
        alone = [
            gae(**{k: v[b : b + 1, s] for k, v in x.items()}, gamma=0.9, gae_lambda=0.8).advantage
            for s in stretches(x["done"][b], torch.ones(9).bool())
        ]
        torch.testing.assert_close(joined[b], torch.cat(alone, 1)[0])


# The mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("seed", range(3))
def test_masked_steps_are_inert_to_the_bit_and_exactly_zero(seed, garbage, dtype):
    x, mask = rollouts(seed=seed, dtype=dtype), some_mask(seed=seed)
    clean = gae(**x, gamma=0.9, gae_lambda=0.8, mask=mask)
    dirty = gae(**spoiled(x, ~mask, garbage), gamma=0.9, gae_lambda=0.8, mask=mask)
    assert_same_bits(clean, dirty)
    assert not any(field[~mask].any() for field in dirty)


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_masking_the_rest_is_the_same_as_a_rollout_that_ended_there(cut):
    x, mask = rollouts(), torch.arange(9).expand(5, 9) < cut
    short = gae(**{k: v[:, :cut] for k, v in x.items()}, gamma=0.9, gae_lambda=0.8)
    masked = gae(**x, gamma=0.9, gae_lambda=0.8, mask=mask)
    assert_same_bits(short, [field[:, :cut] for field in masked])


@pytest.mark.parametrize("seed", range(3))
def test_next_value_outside_the_bootstrap_positions_is_inert(seed):
    x, mask = rollouts(seed=seed), some_mask(seed=seed)
    unneeded = ~bootstrap_positions(x["done"], x["terminated"], mask)
    dirty = spoiled(x, unneeded, float("nan"), ["next_value"])
    assert_same_bits(
        gae(**x, gamma=0.9, gae_lambda=0.8, mask=mask),
        gae(**dirty, gamma=0.9, gae_lambda=0.8, mask=mask),
    )


# Contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays_and_nothing_carries_a_gradient(dtype):
    x = rollouts(dtype=dtype)
    x["value"].requires_grad_()
    for field in gae(**x, gamma=0.9, gae_lambda=0.8, mask=some_mask()):
        assert field.dtype == dtype
        assert not field.requires_grad
        assert field.is_contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": torch.zeros(5, 1).double()}, "one shape"),
        ({"value": torch.zeros(5, 9)}, "float32 throughout"),
        ({"terminated": torch.zeros(5, 9)}, "must be bool"),
        ({"gae_lambda": 1.5}, r"in \[0, 1\]"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        gae(**(rollouts() | {"gamma": 0.9, "gae_lambda": 0.8} | change))


# Normalization


def test_normalization_gives_sample_factory_numbers():
    got = normalize_advantage(row(1, 2, 3, 10), flags(1, 1, 1, 0))
    torch.testing.assert_close(got, row(-1, 0, 1, 0))


@pytest.mark.parametrize("seed", range(5))
def test_unmasked_steps_have_mean_zero_and_standard_deviation_one(seed):
    mask = some_mask(seed=seed)
    got = normalize_advantage(3 + 5 * rollouts(seed=seed)["value"], mask)[mask]
    torch.testing.assert_close(got.mean(), torch.tensor(0.0).double())
    torch.testing.assert_close(got.std(), torch.tensor(1.0).double())


@pytest.mark.parametrize("seed", range(5))
def test_a_mask_is_the_same_as_leaving_the_steps_out(seed):
    x, mask = rollouts(seed=seed)["value"], some_mask(seed=seed)
    torch.testing.assert_close(normalize_advantage(x, mask)[mask], normalize_advantage(x[mask]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", [*GARBAGE, 1e6])
@pytest.mark.parametrize("num_unmasked", [0, 1, 2, 30])
def test_normalization_ignores_masked_steps_to_the_bit(garbage, dtype, num_unmasked):
    mask = (torch.randperm(45, generator=torch.Generator().manual_seed(0)) < num_unmasked).view(
        5, 9
    )
    x = rollouts(dtype=dtype)["value"]
    clean = normalize_advantage(x, mask)
    dirty = normalize_advantage(torch.where(mask, x, garbage), mask)
    assert torch.equal(clean, dirty)
    assert not dirty[~mask].any()
    assert dirty.isfinite().all()
    assert dirty.dtype == dtype


@pytest.mark.parametrize("x", [torch.tensor([3.7]), torch.full((2, 4), 0.5), torch.zeros(0)])
def test_one_step_no_step_or_equal_steps_become_zero(x):
    assert torch.equal(normalize_advantage(x), torch.zeros_like(x))


def test_one_unmasked_step_becomes_zero():
    got = normalize_advantage(torch.tensor([[3.7, 1.0]]), flags(1, 0))
    assert torch.equal(got, torch.zeros(1, 2))


@pytest.mark.parametrize("mask", [torch.ones(5).bool(), torch.ones(5, 1).bool(), torch.ones(5, 9)])
def test_normalization_refuses_a_mask_of_another_kind(mask):
    with pytest.raises(ValueError, match="mask must be bool of shape"):
        normalize_advantage(torch.zeros(5, 9), mask)
