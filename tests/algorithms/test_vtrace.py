"""V-trace, checked against the sum in the paper rather than against our own loop."""

import numpy as np
import pytest
import torch
from rollout_cases import assert_same_bits, flags, row, stretches

from sf_torchrl.algorithms.vtrace import bootstrap_positions, fill_next_value, vtrace

NUMBERS = ("log_ratio", "value", "next_value", "reward")
GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]


def rollouts(B=5, T=9, seed=0, dtype=torch.float64, **fixed):
    """Random rollouts: ratios straddle the clips, some steps terminate and some truncate."""
    g = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(B, T, generator=g, dtype=dtype) for name in NUMBERS}
    done = torch.rand(B, T, generator=g) < 0.25
    x |= {"done": done, "terminated": done & (torch.rand(B, T, generator=g) < 0.5)}
    return x | fixed


def some_mask(B=5, T=9, seed=0):
    return torch.rand(B, T, generator=torch.Generator().manual_seed(1000 + seed)) < 0.7


def paper(x, gamma, rho_clip=1.0, c_clip=1.0, mask=None):
    """Equation 1 and the weight of section 4.2 as written, O(T^2), one stretch at a time."""
    x = {name: tensor.double().numpy() if name in NUMBERS else tensor.numpy()
         for name, tensor in x.items()}  # fmt: skip
    mask = np.ones_like(x["done"]) if mask is None else mask.numpy()
    target, advantage = np.zeros(mask.shape), np.zeros(mask.shape)
    for b in range(len(mask)):
        for s in stretches(x["done"][b], mask[b]):
            log_ratio, reward = x["log_ratio"][b, s], x["reward"][b, s]
            ended = x["terminated"][b, s][-1]
            V = np.append(x["value"][b, s], 0.0 if ended else x["next_value"][b, s][-1])
            rho = np.minimum(rho_clip, np.exp(log_ratio))
            c = np.minimum(c_clip, np.exp(log_ratio))
            n = len(reward)
            delta = [rho[t] * (reward[t] + gamma * V[t + 1] - V[t]) for t in range(n)]
            v = V.copy()
            for i in range(n):
                v[i] += sum(gamma ** (t - i) * np.prod(c[i:t]) * delta[t] for t in range(i, n))
            target[b, s] = v[:-1]
            advantage[b, s] = rho * (reward + gamma * v[1:] - V[:-1])
    return torch.tensor(target), torch.tensor(advantage)


# What it computes


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("rho_clip", "c_clip"), [(1.0, 1.0), (2.0, 0.7), (float("inf"), 1.5)])
def test_target_and_advantage_are_those_of_the_paper(seed, rho_clip, c_clip):
    x = rollouts(B=40, seed=seed)
    got = vtrace(**x, gamma=0.9, rho_clip=rho_clip, c_clip=c_clip)
    torch.testing.assert_close(tuple(got), paper(x, 0.9, rho_clip, c_clip))


@pytest.mark.parametrize("seed", range(10))
def test_with_a_mask_every_stretch_of_unmasked_steps_is_the_paper_on_its_own(seed):
    x, mask = rollouts(B=40, seed=seed), some_mask(B=40, seed=seed)
    got = vtrace(**x, gamma=0.9, mask=mask)
    torch.testing.assert_close(tuple(got), paper(x, 0.9, mask=mask))


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_torchrl(seed):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    x = rollouts(B=20, seed=seed)
    needed = bootstrap_positions(x["done"], x["terminated"])
    x["next_value"] = fill_next_value(x["value"], x["next_value"][needed], needed, x["terminated"])
    y = {name: tensor.unsqueeze(-1) for name, tensor in x.items()}
    advantage, target = functional.vtrace_advantage_estimate(
        0.9, y["log_ratio"], torch.zeros_like(y["value"]), y["value"], y["next_value"],
        y["reward"], y["done"], y["terminated"],
    )  # fmt: skip
    want = (target.squeeze(-1), advantage.squeeze(-1))
    torch.testing.assert_close(tuple(vtrace(**x, gamma=0.9)), want)


@pytest.mark.parametrize("seed", range(3))
def test_on_policy_the_target_is_the_discounted_return(seed):
    x = rollouts(B=1, T=6, seed=seed, log_ratio=torch.zeros(1, 6).double())
    x |= {"done": flags(0, 0, 1, 0, 0, 0), "terminated": flags(0, 0, 1, 0, 0, 0)}
    r, last = x["reward"][0], x["next_value"][0, -1]
    first = r[0] + 0.9 * r[1] + 0.81 * r[2]
    second = r[3] + 0.9 * r[4] + 0.81 * r[5] + 0.729 * last
    got = vtrace(**x, gamma=0.9)
    torch.testing.assert_close(got.value_target[0, [0, 3]], torch.stack([first, second]))
    torch.testing.assert_close(got.advantage, got.value_target - x["value"])


def test_a_true_value_function_has_no_advantage_whoever_acted():
    ten = torch.full((1, 4), 10.0, dtype=torch.float64)  # reward 1 for ever, gamma 0.9
    truncated = flags(0, 1, 0, 0)
    x = rollouts(B=1, T=4, value=ten, next_value=ten, reward=ten / 10, done=truncated)
    x["terminated"] = flags(0, 0, 0, 0)
    got = vtrace(**x, gamma=0.9)
    torch.testing.assert_close(got.advantage, 0 * ten)
    torch.testing.assert_close(got.value_target, ten)


def test_an_action_that_the_target_policy_never_takes_teaches_nothing():
    x = rollouts(log_ratio=torch.full((5, 9), -1e4).double())
    got = vtrace(**x, gamma=0.9)
    assert torch.equal(got.value_target, x["value"])
    assert torch.equal(got.advantage, torch.zeros(5, 9).double())


def test_a_ratio_that_overflows_is_only_clipped():
    x = rollouts(log_ratio=torch.full((5, 9), 1e4).double())
    on_policy = x | {"log_ratio": torch.zeros(5, 9).double()}
    assert_same_bits(vtrace(**x, gamma=0.9), vtrace(**on_policy, gamma=0.9))


# Credit and boundaries


def test_a_reward_at_the_last_step_of_a_rollout_gets_credit():
    zero = torch.zeros(1, 4).double()
    x = rollouts(B=1, T=4, log_ratio=zero, value=zero, reward=row(0, 0, 0, 1))
    x |= {"next_value": row(9, 9, 9, 0.5), "done": flags(0, 0, 0, 0)}
    x["terminated"] = x["done"]
    got = vtrace(**x, gamma=0.9)
    credit = 1 + 0.9 * 0.5
    torch.testing.assert_close(got.advantage, row(0.729, 0.81, 0.9, 1) * credit)
    defective = vtrace(**x, gamma=0.9, bootstrap="sample_factory")
    assert defective.advantage[0, -1] == 0


@pytest.mark.parametrize("t", [1, 3])
def test_truncation_bootstraps_from_its_own_next_value(t):
    x = rollouts(B=1, T=4, done=flags(*[i == t for i in range(4)]))
    x["terminated"] = flags(0, 0, 0, 0)
    got = vtrace(**x, gamma=0.9).value_target[0, t]
    rho = x["log_ratio"].exp().clamp(max=1)
    error = x["reward"] + 0.9 * x["next_value"] - x["value"]
    torch.testing.assert_close(got, (x["value"] + rho * error)[0, t])


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_termination_never_bootstraps(t, garbage):
    ended = flags(*[i == t for i in range(4)])
    x = rollouts(B=1, T=4, done=ended, terminated=ended)
    got = vtrace(**x, gamma=0.9)
    assert_same_bits(got, vtrace(**spoiled(x, ended, garbage, ["next_value"]), gamma=0.9))
    rho = x["log_ratio"].exp().clamp(max=1)
    advantage = rho * (x["reward"] - x["value"])
    torch.testing.assert_close(got.advantage[0, t], advantage[0, t])


@pytest.mark.parametrize("seed", range(10))
def test_a_batch_is_its_trajectories_one_after_another(seed):
    x = rollouts(B=100, seed=seed)
    joined = vtrace(**x, gamma=0.9)
    for b in range(100):
        alone = [
            vtrace(**{name: tensor[b : b + 1, s] for name, tensor in x.items()}, gamma=0.9)
            for s in stretches(x["done"][b], torch.ones(9).bool())
        ]
        for field in ("value_target", "advantage"):
            want = torch.cat([getattr(part, field)[0] for part in alone])
            torch.testing.assert_close(getattr(joined, field)[b], want)


def test_rollouts_do_not_mix():
    x, order = rollouts(), torch.tensor([3, 0, 4, 1, 2])
    shuffled = vtrace(**{name: tensor[order] for name, tensor in x.items()}, gamma=0.9)
    assert_same_bits(shuffled, [field[order] for field in vtrace(**x, gamma=0.9)])


def test_terminated_alone_ends_an_episode_too():
    x = rollouts()
    x["done"] = x["done"] & ~x["terminated"]
    whole = x | {"done": x["done"] | x["terminated"]}
    assert_same_bits(vtrace(**x, gamma=0.9), vtrace(**whole, gamma=0.9))


# The mask


def spoiled(x, where, garbage, names=NUMBERS):
    """The same rollouts with garbage where asked, and episode ends turned round there."""
    x = x | {name: torch.where(where, garbage, x[name]) for name in names}
    if names == NUMBERS:
        x |= {name: x[name] ^ where for name in ("done", "terminated")}
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bootstrap", ["next_value", "sample_factory"])
def test_masked_steps_are_inert_to_the_bit(seed, garbage, dtype, bootstrap):
    x, mask = rollouts(seed=seed, dtype=dtype), some_mask(seed=seed)
    clean = vtrace(**x, gamma=0.9, mask=mask, bootstrap=bootstrap)
    dirty = vtrace(**spoiled(x, ~mask, garbage), gamma=0.9, mask=mask, bootstrap=bootstrap)
    assert_same_bits(clean, dirty)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_steps_change_no_gradient_by_a_bit(garbage):
    mask, gradients = some_mask(), []
    for x in (rollouts(), spoiled(rollouts(), ~mask, garbage)):
        log_ratio, value = x["log_ratio"].requires_grad_(), x["value"].requires_grad_()
        target, advantage = vtrace(**x, gamma=0.9, mask=mask)
        error = value[mask] - target[mask]
        loss = error.square().sum() - (log_ratio[mask].exp() * advantage[mask]).sum()
        gradients.append(torch.autograd.grad(loss, (log_ratio, value)))
    assert_same_bits(*gradients)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_outputs_are_exactly_zero(garbage):
    mask = some_mask()
    got = vtrace(**spoiled(rollouts(), ~mask, garbage), gamma=0.9, mask=mask)
    assert not got.value_target[~mask].any()
    assert not got.advantage[~mask].any()


@pytest.mark.parametrize("cut", [1, 4, 8])
def test_masking_the_rest_is_the_same_as_a_rollout_that_ended_there(cut):
    x, mask = rollouts(), torch.arange(9).expand(5, 9) < cut
    short = vtrace(**{name: tensor[:, :cut] for name, tensor in x.items()}, gamma=0.9)
    masked = vtrace(**x, gamma=0.9, mask=mask)
    assert_same_bits(short, [field[:, :cut] for field in masked])


def test_an_all_true_mask_is_no_mask():
    x = rollouts()
    assert_same_bits(vtrace(**x, gamma=0.9), vtrace(**x, gamma=0.9, mask=torch.ones(5, 9).bool()))


def test_an_all_false_mask_gives_zeros():
    got = vtrace(**rollouts(), gamma=0.9, mask=torch.zeros(5, 9).bool())
    assert_same_bits(got, (torch.zeros(5, 9).double(), torch.zeros(5, 9).double()))


# Where next_value is needed


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_next_value_is_read_exactly_at_the_bootstrap_positions(seed, masked):
    x, mask = rollouts(seed=seed), some_mask(seed=seed) if masked else None
    positions = bootstrap_positions(x["done"], x["terminated"], mask)
    clean = vtrace(**x, gamma=0.9, mask=mask)
    for b in range(5):
        for t in range(9):
            here = torch.zeros(5, 9, dtype=torch.bool)
            here[b, t] = True
            x_nan = spoiled(x, here, float("nan"), ["next_value"])
            dirty = vtrace(**x_nan, gamma=0.9, mask=mask)
            if positions[b, t]:
                assert dirty.value_target[b, t].isnan()
            else:
                assert_same_bits(clean, dirty)


def test_bootstrap_positions_by_hand():
    done = flags(0, 1, 1, 0, 0, 0)
    terminated = flags(0, 1, 0, 0, 0, 0)
    assert bootstrap_positions(done, terminated).tolist() == flags(0, 0, 1, 0, 0, 1).tolist()
    mask = flags(1, 1, 1, 1, 0, 1)
    assert bootstrap_positions(done, terminated, mask).tolist() == flags(0, 0, 1, 1, 0, 1).tolist()
    mask = flags(0, 0, 0, 1, 1, 0)
    assert bootstrap_positions(done, terminated, mask).tolist() == flags(0, 0, 0, 0, 1, 0).tolist()


def test_a_terminated_step_needs_no_next_value_even_before_a_mask_or_at_the_end():
    ended = flags(0, 1, 0, 1)
    assert not bootstrap_positions(ended, ended, flags(0, 1, 0, 1)).any()


def test_fill_next_value_by_hand():
    positions, terminated = flags(0, 1, 0, 0, 0), flags(0, 0, 1, 0, 1)
    got = fill_next_value(row(1, 2, 3, 4, 5), torch.tensor([20.0]), positions, terminated)
    assert torch.equal(got, row(2, 20, 0, 5, 0))


def test_fill_never_wraps_round_to_the_start_of_a_rollout():
    none = flags(0, 0, 0)  # no position: the last step is masked
    got = fill_next_value(row(1, 2, 3), torch.zeros(0), none, none)
    assert torch.equal(got, row(2, 3, 0))


def test_filled_values_are_in_the_order_of_boolean_indexing():
    dense = torch.arange(45.0).view(5, 9)
    x = rollouts(dtype=torch.float32)
    positions = bootstrap_positions(x["done"], x["terminated"])
    got = fill_next_value(x["value"], dense[positions], positions, x["terminated"])
    assert torch.equal(got[positions], dense[positions])


@pytest.mark.parametrize("seed", range(3))
def test_filling_in_the_few_that_are_needed_changes_nothing(seed):
    x, mask = rollouts(seed=seed), some_mask(seed=seed)
    positions = bootstrap_positions(x["done"], x["terminated"], mask)
    few = x["next_value"][positions]
    filled = x | {"next_value": fill_next_value(x["value"], few, positions, x["terminated"])}
    assert_same_bits(vtrace(**x, gamma=0.9, mask=mask), vtrace(**filled, gamma=0.9, mask=mask))


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), (1, 6)])
def test_fill_refuses_another_number_of_values(shape):
    positions = flags(1, 0, 1, 0, 0, 1)
    with pytest.raises(ValueError, match=r"bootstrap_value must be \[3\]"):
        fill_next_value(torch.zeros(1, 6), torch.zeros(shape), positions, ~positions)


# Sample Factory's start, for parity

NONE_OF_FOUR = flags(0, 0, 0, 0)
ODD_RATIOS = row(1.2, 0.5, 0.8, 2)


@pytest.mark.parametrize(
    ("done", "ratio", "target", "advantage"),
    [
        (NONE_OF_FOUR, row(1, 1, 1, 1), row(3.15425980, 2.17602, 2.198, 0.2),
         row(2.65425980, 1.77602, 1.898, 0)),
        (flags(0, 1, 0, 0), ODD_RATIOS, row(1.198, 0.2, 1.8184, 0.2), row(0.698, -0.2, 1.5184, 0)),
        (flags(0, 1, 0, 1), ODD_RATIOS, row(1.198, 0.2, 2.452, 1.0), row(0.698, -0.2, 2.152, 0.8)),
    ],
    ids=["V1", "V2", "V3"],
)  # fmt: skip
def test_sample_factory_bootstrap_gives_sample_factory_numbers(done, ratio, target, advantage):
    got = vtrace(
        ratio.log(), row(0.5, 0.4, 0.3, 0.2), row(*[float("nan")] * 4), row(1, 0, 2, 1), done, done,
        gamma=0.99, bootstrap="sample_factory",
    )  # fmt: skip
    torch.testing.assert_close(got.value_target, target, atol=1e-8, rtol=0)
    torch.testing.assert_close(got.advantage, advantage, atol=1e-8, rtol=0)


def sample_factory_loop(ratio, value, reward, done, gamma):
    """Sample Factory's recursion as its learner runs it, one rollout."""
    T = len(value)
    target, advantage = np.zeros(T), np.zeros(T)
    next_v = next_vs = (value[-1] - reward[-1]) / gamma
    for t in reversed(range(T)):
        g, rho = (1 - done[t]) * gamma, min(1.0, ratio[t])
        advantage[t] = rho * (reward[t] + g * next_vs - value[t])
        target[t] = value[t] + rho * (reward[t] + g * next_v - value[t])
        target[t] += g * rho * (next_vs - next_v)
        next_v, next_vs = value[t], target[t]
    return torch.tensor(target), torch.tensor(advantage)


@pytest.mark.parametrize("seed", range(5))
def test_sample_factory_bootstrap_follows_sample_factory_loop(seed):
    x = rollouts(B=20, seed=seed)
    x["terminated"] = x["done"]
    got = vtrace(**x, gamma=0.9, bootstrap="sample_factory")
    for b in range(20):
        args = [x[name][b].numpy() for name in ("log_ratio", "value", "reward", "done")]
        want = sample_factory_loop(np.exp(args[0]), *args[1:], gamma=0.9)
        torch.testing.assert_close((got.value_target[b], got.advantage[b]), want)


# Contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_dtype_stays_and_nothing_carries_a_gradient(dtype):
    x = rollouts(dtype=dtype)
    for name in NUMBERS:
        x[name].requires_grad_()
    for field in vtrace(**x, gamma=0.9, mask=some_mask()):
        assert field.dtype == dtype
        assert not field.requires_grad
        assert field.is_contiguous()


def test_float32_is_as_good_as_float64():
    x = rollouts(B=64, T=32)
    single = vtrace(**{n: t.float() if n in NUMBERS else t for n, t in x.items()}, gamma=0.99)
    double = vtrace(**x, gamma=0.99)
    for a, b in zip(single, double, strict=True):
        torch.testing.assert_close(a.double(), b, atol=1e-4, rtol=1e-4)


def test_inputs_are_left_as_they_were():
    x = rollouts()
    before = {name: tensor.clone() for name, tensor in x.items()}
    vtrace(**x, gamma=0.9, mask=some_mask(), bootstrap="sample_factory")
    assert all(torch.equal(x[name], before[name]) for name in x)


@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 5), (5, 1), (0, 3)])
def test_small_shapes(B, T):
    x = rollouts(B=B, T=T)
    torch.testing.assert_close(tuple(vtrace(**x, gamma=0.9)), paper(x, 0.9))


def test_memory_layout_does_not_matter():
    x = rollouts()
    strided = {name: tensor.t().contiguous().t() for name, tensor in x.items()}
    assert_same_bits(vtrace(**x, gamma=0.9), vtrace(**strided, gamma=0.9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": torch.zeros(5, 9, 1).double()}, "one shape"),
        ({"reward": torch.zeros(9).double()}, "one shape"),
        ({"mask": torch.ones(5, 1).bool()}, "one shape"),
        ({"reward": torch.zeros(5, 9)}, "float32 throughout"),
        ({"done": torch.zeros(5, 9)}, "must be bool"),
        ({"gamma": 99.0}, r"in \[0, 1\]"),
        ({"gamma": float("nan")}, r"in \[0, 1\]"),
        ({"bootstrap": "sf"}, "'sf'"),
        ({"bootstrap": "sample_factory", "gamma": 0.0}, "divides by gamma"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        vtrace(**(rollouts() | {"gamma": 0.9} | change))


def test_half_precision_is_refused():
    with pytest.raises(ValueError, match="float32 throughout"):
        vtrace(**rollouts(dtype=torch.bfloat16), gamma=0.9)
