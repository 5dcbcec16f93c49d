"""Action distributions, checked against torch.distributions, known numbers and counts."""

import math
import pickle

import pytest
import torch
import torch.distributions as td

from sf_torchrl.algorithms.distributions import Categorical, DiagonalGaussian

INF = float("inf")
SPACES = [Categorical(1), Categorical(5), DiagonalGaussian(1), DiagonalGaussian(3)]
LEADING = [(), (7,), (4, 6)]


def params_for(space, *leading, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*leading, space.num_params, generator=g, dtype=dtype)


def oracle(space, params):
    if isinstance(space, Categorical):
        return td.Categorical(logits=params)
    mean, log_std = params.chunk(2, -1)
    return td.Independent(td.Normal(mean, log_std.exp()), 1)


# Both kinds


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("leading", LEADING)
def test_shapes_and_types_are_as_declared(space, leading):
    params = params_for(space, *leading)
    for action in (space.sample(params), space.mode(params)):
        assert action.shape == (*leading, *space.action_shape)
        assert action.dtype == space.action_dtype
    log_prob, entropy = space.log_prob_and_entropy(params, action)
    assert log_prob.shape == entropy.shape == space.kl(params, params).shape == leading


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("leading", LEADING)
@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_torch_distributions(space, leading, seed):
    params, old_params = (params_for(space, *leading, seed=seed + i) for i in (0, 100))
    want, old = oracle(space, params), oracle(space, old_params)
    action = want.sample()
    torch.testing.assert_close(space.log_prob(params, action), want.log_prob(action))
    torch.testing.assert_close(space.entropy(params), want.entropy(), atol=1e-6, rtol=1e-5)
    kl = td.kl_divergence(want, old)
    torch.testing.assert_close(space.kl(params, old_params), kl, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_gradients_agree_with_torch_distributions(space):
    gradients, old_params = [], params_for(space, 4, 6, seed=1, dtype=torch.float64)
    action = oracle(space, old_params).sample()
    for exact in (False, True):
        params = params_for(space, 4, 6, dtype=torch.float64).requires_grad_()
        if exact:
            d = oracle(space, params)
            terms = d.log_prob(action), d.entropy(), td.kl_divergence(d, oracle(space, old_params))
        else:
            terms = *space.log_prob_and_entropy(params, action), space.kl(params, old_params)
        total = sum(weight * term.sum() for weight, term in zip((1, 2, 3), terms, strict=True))
        gradients.append(torch.autograd.grad(total, params)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_both_at_once_are_the_same_bits_as_each_alone(space):
    params = params_for(space, 9)
    action = space.sample(params)
    log_prob, entropy = space.log_prob_and_entropy(params, action)
    assert torch.equal(log_prob, space.log_prob(params, action))
    assert torch.equal(entropy, space.entropy(params))


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_the_ratio_is_one_at_zero_lag_whatever_the_batch(space):
    params = params_for(space, 4, 6)
    action = space.sample(params)
    together = space.log_prob(params, action)
    alone = torch.stack([space.log_prob(params[i, :3], action[i, :3]) for i in range(4)])
    assert ((together[:, :3] - alone).exp() - 1).abs().max() < 1e-5


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_divergence_from_itself_is_zero_and_from_others_is_not_negative(space):
    params = params_for(space, 1000)
    torch.testing.assert_close(space.kl(params, params), torch.zeros(1000))
    assert (space.kl(params, params_for(space, 1000, seed=1)) > -1e-6).all()


@pytest.mark.parametrize("space", [Categorical(4), DiagonalGaussian(2)], ids=repr)
def test_entropy_and_divergence_are_the_means_of_log_probabilities(space):
    torch.manual_seed(0)
    params, old_params = (params_for(space, seed=i, dtype=torch.float64) for i in (1, 2))
    many = params.expand(200_000, -1)
    action = space.sample(many)
    log_prob = space.log_prob(many, action)
    old = space.log_prob(old_params.expand(200_000, -1), action)
    torch.testing.assert_close(-log_prob.mean(), space.entropy(params), atol=0.02, rtol=0)
    kl = space.kl(params, old_params)
    torch.testing.assert_close((log_prob - old).mean(), kl, atol=0, rtol=0.01)


@pytest.mark.parametrize("space", SPACES, ids=repr)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_worked_on_in_float32(space, half):
    params = params_for(space, 7).to(half)
    action = space.sample(params)
    assert action.dtype == space.action_dtype
    for got, want in zip(
        space.log_prob_and_entropy(params, action),
        space.log_prob_and_entropy(params.float(), action),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_drawing_repeats_with_the_seed_and_carries_no_gradient(space):
    params = params_for(space, 50).requires_grad_()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(space.sample(params))
    assert torch.equal(draws[0], draws[1])
    assert not draws[0].requires_grad
    if space.num_params > 1:
        assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_drawing_leaves_the_parameters_alone(space):
    params = params_for(space, 50)
    before = params.clone()
    space.sample(params)
    assert torch.equal(params, before)


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_a_space_is_a_value(space):
    assert pickle.loads(pickle.dumps(space)) == space
    assert len({space, pickle.loads(pickle.dumps(space))}) == 1


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_shapes_that_would_broadcast_are_refused(space):
    params = params_for(space, 7)
    action = space.sample(params)
    with pytest.raises(ValueError, match="action must be"):
        space.log_prob(params, action.unsqueeze(-1))
    with pytest.raises(ValueError, match="action must be"):
        space.log_prob_and_entropy(params, action[:1])
    with pytest.raises(ValueError, match="one shape"):
        space.kl(params, params[:1])
    with pytest.raises(ValueError, match="params must be"):
        space.entropy(torch.zeros(7, space.num_params + 1))
    with pytest.raises(ValueError, match="params must be"):
        space.sample(torch.tensor(0.0))


@pytest.mark.parametrize("kind", [Categorical, DiagonalGaussian])
@pytest.mark.parametrize("size", [0, -1])
def test_an_empty_space_is_refused(kind, size):
    with pytest.raises(ValueError, match=str(size)):
        kind(size)


# Categorical


def test_categorical_gives_sample_factory_numbers():
    space, logits = Categorical(3), torch.tensor([0.0, 1.0, 2.0])
    log_prob = space.log_prob(logits.expand(3, 3), torch.arange(3))
    torch.testing.assert_close(
        log_prob.exp(), torch.tensor([0.0900305732, 0.2447284711, 0.6652409558])
    )
    torch.testing.assert_close(space.entropy(logits), torch.tensor(0.8323955818))
    uniform = torch.zeros(3)
    symmetric = 0.5 * (space.kl(logits, uniform) + space.kl(uniform, logits))
    torch.testing.assert_close(symmetric, torch.tensor(0.2876051913))


def test_three_coins_give_sample_factory_numbers():
    coins = torch.zeros(3, 2)
    log_prob, entropy = Categorical(2).log_prob_and_entropy(coins, torch.ones(3).long())
    torch.testing.assert_close(log_prob.sum(), torch.tensor(-2.0794415))
    torch.testing.assert_close(entropy.sum(), torch.tensor(2.0794415))


@pytest.mark.parametrize("logits", [[0.0, 0.0], [2.0, -1.0, 0.5], [-3.0] + [0.0] * 16 + [3.0]])
@pytest.mark.parametrize("seed", range(3))
def test_actions_come_as_often_as_they_should(logits, seed):
    torch.manual_seed(seed)
    num_draws, logits = 200_000, torch.tensor(logits)
    space = Categorical(len(logits))
    counts = space.sample(logits.expand(num_draws, -1)).bincount(minlength=space.n)
    expected = num_draws * logits.double().softmax(0)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    df = space.n - 1  # Wilson and Hilferty's approximation of the 99.997% quantile
    assert chi_square < df * (1 - 2 / (9 * df) + 4 * math.sqrt(2 / (9 * df))) ** 3


def test_rows_are_drawn_independently():
    torch.manual_seed(0)
    draws = Categorical(2).sample(torch.zeros(100_000, 2, 2))
    both = (draws[:, 0] & draws[:, 1]).double().mean()
    assert abs(both - 0.25) < 0.01


def test_the_mode_is_the_most_probable_action():
    assert Categorical(3).mode(torch.tensor([[0.0, 5.0, 1.0], [2.0, 2.0, 1.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_logits_need_not_be_normalized(offset):
    space, logits = Categorical(4), params_for(Categorical(4), 50, dtype=torch.float64)
    action = space.sample(logits)
    torch.testing.assert_close(
        space.log_prob_and_entropy(logits + offset, action),
        space.log_prob_and_entropy(logits, action),
    )


def test_a_certain_action_has_no_entropy():
    space, logits = Categorical(2), torch.tensor([0.0, -1000.0])
    assert space.entropy(logits) == 0
    assert space.log_prob(logits, torch.tensor(0)) == 0


@pytest.mark.parametrize("allowed", [[0], [2], [0, 2, 4]])
def test_a_forbidden_action_is_never_drawn(allowed):
    torch.manual_seed(0)
    logits = torch.full((5,), -INF)
    logits[allowed] = 0.0
    draws = Categorical(5).sample(logits.expand(100_000, -1))
    assert draws.unique().tolist() == allowed
    assert Categorical(5).mode(logits).item() == allowed[0]


def test_the_only_action_allowed_is_drawn_even_with_the_lowest_random_number(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low, high: x.fill_(low))
    assert Categorical(3).sample(torch.tensor([-INF, -INF, 0.0])).item() == 2


def test_forbidden_actions_are_as_if_they_were_not_there():
    few = params_for(Categorical(3), 20).requires_grad_()
    many = torch.full((20, 5), -INF)
    many[:, [0, 2, 4]] = few.detach()
    many.requires_grad_()
    old_few, old_many = few.detach().roll(1, 0), many.detach().roll(1, 0)
    action = torch.arange(20) % 3
    got = (
        *Categorical(5).log_prob_and_entropy(many, 2 * action),
        Categorical(5).kl(many, old_many),
    )
    want = (
        *Categorical(3).log_prob_and_entropy(few, action),
        Categorical(3).kl(few, old_few),
    )
    torch.testing.assert_close(got, want)
    sum(term.sum() for term in got).backward()
    sum(term.sum() for term in want).backward()
    torch.testing.assert_close(many.grad[:, [0, 2, 4]], few.grad)
    assert not many.grad[:, [1, 3]].any()
    assert Categorical(5).log_prob(many[0], torch.tensor(1)) == -INF


# Gaussian


def test_gaussian_gives_sample_factory_numbers():
    space, params = DiagonalGaussian(2), torch.tensor([0.5, 0.5, 0.0, 0.0])
    log_prob, entropy = space.log_prob_and_entropy(params, torch.ones(2))
    torch.testing.assert_close(log_prob, torch.tensor(-2.0878770664))
    torch.testing.assert_close(entropy, torch.tensor(2.8378770664))


def test_gaussian_draws_have_the_mean_and_deviation_asked_for():
    torch.manual_seed(0)
    params = torch.tensor([3.0, -1.0, math.log(0.5), math.log(2.0)])
    draws = DiagonalGaussian(2).sample(params.expand(200_000, -1))
    torch.testing.assert_close(draws.mean(0), torch.tensor([3.0, -1.0]), atol=0.02, rtol=0)
    want = torch.tensor([[0.25, 0.0], [0.0, 4.0]])
    torch.testing.assert_close(draws.T.cov(), want, atol=0.05, rtol=0)


def test_the_mode_is_the_mean():
    assert DiagonalGaussian(2).mode(torch.tensor([3.0, -1.0, 0.0, 9.0])).tolist() == [3.0, -1.0]


@pytest.mark.parametrize(("log_std", "std"), [(-100.0, 1e-4), (100.0, 1e4), (-INF, 1e-4)])
def test_deviations_are_clamped(log_std, std):
    space = DiagonalGaussian(1)
    params = torch.tensor([0.5, log_std], dtype=torch.float64, requires_grad=True)
    action = torch.tensor([0.5 + 2 * std], dtype=torch.float64)
    want = td.Normal(0.5, std)
    log_prob, entropy = space.log_prob_and_entropy(params, action)
    assert log_prob.item() == pytest.approx(want.log_prob(action).item())
    assert entropy.item() == pytest.approx(want.entropy().item())
    (gradient,) = torch.autograd.grad(log_prob + entropy, params)
    assert gradient.isfinite().all()
    assert gradient[1] == 0
    torch.manual_seed(0)
    assert space.sample(params.expand(10_000, 2)).std().item() == pytest.approx(std, rel=0.05)


def test_actions_are_not_clipped():
    torch.manual_seed(0)
    draws = DiagonalGaussian(1).sample(torch.zeros(10_000, 2))
    assert draws.abs().max() > 2
