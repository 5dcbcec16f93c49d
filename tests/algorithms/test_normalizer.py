"""Running mean and variance: Sample Factory's numbers, and what must leave them alone."""

import pytest
import torch

from sf_torchrl.algorithms.normalizer import RunningMeanStd

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e30]


def normalizer_of(*batches, shape=(3,)):
    rms = RunningMeanStd(shape)
    for batch in batches:
        rms.update(batch)
    return rms


def noise(*size, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def statistics(rms):
    return [buffer.clone() for buffer in (rms.mean, rms.var, rms.count)]


def assert_same_bits(a, b):
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


# What it computes


def test_starts_as_one_row_of_mean_zero_and_variance_one():
    rms = RunningMeanStd((2,))
    assert_same_bits(statistics(rms), [torch.zeros(2), torch.ones(2), torch.tensor(1.0)])
    torch.testing.assert_close(rms(torch.tensor([0.5, -2.0])), torch.tensor([0.5, -2.0]))


def test_four_numbers_give_sample_factory_numbers():
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    rms = normalizer_of(x, shape=(1,))
    got = [buffer.item() for buffer in statistics(rms)]
    assert got == pytest.approx([2.0, 2.5333333, 5.0])
    want = torch.tensor([[-0.6282796], [0.0], [0.6282796], [1.2565592]])
    torch.testing.assert_close(rms(x), want)


def test_an_outlier_gives_sample_factory_numbers():
    x = torch.zeros(1000, 1)
    x[-1] = 1e4
    rms = normalizer_of(x, shape=(1,))
    got = [buffer.item() for buffer in statistics(rms)]
    assert got == pytest.approx([9.990010, 99900.2007, 1001.0])
    assert rms(x)[0].item() == pytest.approx(-0.0316070, abs=1e-7)
    assert rms(x)[-1].item() == 5.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(), (1,), (3, 7)])
def test_after_many_batches_it_is_the_mean_and_variance_of_all_rows(seed, shape):
    batches = [5 + 3 * noise(200, *shape, seed=10 * seed + i) for i in range(9)]
    rms = normalizer_of(*batches, shape=shape)
    everything = torch.cat([torch.zeros(1, *shape), *batches]).double()
    torch.testing.assert_close(rms.mean, everything.mean(0), atol=1e-5, rtol=1e-5)
    # Looser: the first row of variance 1, and unbiased estimates of each batch.
    torch.testing.assert_close(rms.var, everything.var(0), atol=0, rtol=0.01)
    assert rms.count == 1801
    normal = rms(torch.cat(batches))
    torch.testing.assert_close(normal.mean(0), torch.zeros(shape), atol=0.01, rtol=0)
    torch.testing.assert_close(normal.std(0), torch.ones(shape), atol=0.02, rtol=0)


def merged(rms, rows):
    """Chan's formula for one column, in plain numbers."""
    mean, var, count = (x.item() for x in (rms.mean, rms.var, rms.count))
    n = len(rows)
    batch_mean = sum(rows) / n
    batch_var = sum((row - batch_mean) ** 2 for row in rows) / (n - 1)
    total, delta = count + n, batch_mean - mean
    spread = var * count + batch_var * n + delta**2 * count * n / total
    return [mean + delta * n / total, spread / total, total]


@pytest.mark.parametrize("seed", range(3))
def test_each_update_follows_the_formula(seed):
    rms = RunningMeanStd(())
    for i in range(5):
        rows = noise(2 + i, seed=10 * seed + i, dtype=torch.float64)
        want = merged(rms, rows.tolist())
        rms.update(rows)
        assert [x.item() for x in statistics(rms)] == pytest.approx(want)


def test_one_row_is_enough_and_makes_no_nan():
    rms = normalizer_of(torch.tensor([[2.0]]), shape=(1,))
    got = [buffer.item() for buffer in statistics(rms)]
    assert got == pytest.approx([1.0, 1.5, 2.0])  # rows 0 and 2, and the first row's variance 1


def test_a_large_offset_does_not_drown_the_variance():
    rms = RunningMeanStd(())
    rms.mean.fill_(1e6)
    for i in range(50):
        rms.update(1e6 + noise(1000, seed=i, dtype=torch.float64))
    assert rms.var.item() == pytest.approx(1.0, abs=0.02)


def test_leading_dimensions_are_all_rows():
    x = noise(4, 5, 3)
    flat, nested = normalizer_of(x.view(20, 3)), normalizer_of(x)
    assert_same_bits(statistics(flat), statistics(nested))
    assert torch.equal(flat(x), flat(x.view(20, 3)).view(4, 5, 3))


def test_a_single_row_without_leading_dimensions():
    assert_same_bits(
        statistics(normalizer_of(noise(3))), statistics(normalizer_of(noise(3).view(1, 3)))
    )


# Who may change the statistics


def test_the_forward_pass_never_updates_even_in_training_mode():
    rms = normalizer_of(noise(10, 3)).train()
    before = statistics(rms)
    rms(noise(100, 3, seed=1))
    assert_same_bits(before, statistics(rms))


def test_the_input_is_left_as_it_was():
    rms, x = normalizer_of(noise(10, 3)), noise(10, 3, seed=1)
    rms(x)
    rms.update(x)
    assert torch.equal(x, noise(10, 3, seed=1))


@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_rows_are_inert_to_the_bit(garbage):
    x, mask = noise(4, 5, 3), noise(4, 5, seed=1) > 0
    results = []
    for rows in (x, torch.where(mask.unsqueeze(-1), x, garbage)):
        rms = normalizer_of(noise(10, 3, seed=2))
        rms.update(rows, mask)
        results.append(statistics(rms))
    rms = normalizer_of(noise(10, 3, seed=2))
    rms.update(x[mask])
    assert_same_bits(*results)
    assert_same_bits(results[0], statistics(rms))


@pytest.mark.parametrize("rows", [torch.full((4, 3), float("nan")), torch.zeros(0, 3)])
def test_without_a_row_left_nothing_happens(rows):
    rms = normalizer_of(noise(10, 3))
    before = statistics(rms)
    rms.update(rows, torch.zeros(len(rows), dtype=torch.bool))
    assert_same_bits(before, statistics(rms))


def test_updates_are_written_in_place_so_that_views_see_them():
    rms = RunningMeanStd((3,))
    views = [rms.mean.view(-1), rms.var.view(-1), rms.count.view(-1)]
    rms.update(noise(10, 3))
    assert_same_bits([x.view(-1) for x in statistics(rms)], views)
    assert rms.mean.data_ptr() == views[0].data_ptr()


def test_no_gradient_reaches_the_statistics_but_one_reaches_the_input():
    rms, x = normalizer_of(noise(10, 3)), noise(10, 3).requires_grad_()
    rms.update(x)
    rms(x).sum().backward()
    assert not rms.mean.requires_grad
    want = ((rms.var + 1e-5).rsqrt()).float().expand(10, 3)
    torch.testing.assert_close(x.grad, want)


# Types, devices, files


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_any_numeric_input_gives_float32(dtype):
    x = torch.arange(12).view(4, 3)
    rms = normalizer_of(x.to(dtype))
    assert rms(x.to(dtype)).dtype == torch.float32
    torch.testing.assert_close(statistics(rms), statistics(normalizer_of(x.float())))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double"])
def test_statistics_stay_float64_when_the_module_is_cast(cast):
    rms = normalizer_of(noise(10, 3))
    before = statistics(rms)
    getattr(torch.nn.Sequential(rms), cast)()
    assert_same_bits(before, statistics(rms))
    assert all(buffer.dtype == torch.float64 for buffer in rms.buffers())


def test_statistics_follow_the_module_to_another_device():
    rms = RunningMeanStd((3,)).to("meta", torch.float16)
    assert all(x.is_meta and x.dtype == torch.float64 for x in rms.buffers())


def test_rows_are_counted_beyond_what_float32_can():
    rms = RunningMeanStd(())
    rms.count.fill_(2.0**24)
    rms.update(torch.zeros(1))
    assert rms.count.item() == 2**24 + 1


def test_statistics_are_saved_and_loaded_with_the_weights():
    rms, other = normalizer_of(noise(10, 3)), RunningMeanStd((3,))
    assert set(rms.state_dict()) == {"mean", "var", "count"}
    other.load_state_dict(rms.state_dict())
    assert torch.equal(other(noise(5, 3)), rms(noise(5, 3)))


def test_clip_and_eps_are_configurable():
    rms = RunningMeanStd((1,), eps=3.0, clip=1.0)
    torch.testing.assert_close(rms(torch.tensor([[1.0], [50.0]])), torch.tensor([[0.5], [1.0]]))
    assert repr(rms) == "RunningMeanStd((1,), eps=3.0, clip=1.0)"


@pytest.mark.parametrize("size", [(5, 1), (5, 3, 1), (1,), (5, 4)])
def test_rows_of_another_shape_are_refused(size):
    rms = RunningMeanStd((3,))
    with pytest.raises(ValueError, match="expected"):
        rms(torch.zeros(size))
    with pytest.raises(ValueError, match="expected"):
        rms.update(torch.zeros(size))


@pytest.mark.parametrize("mask", [torch.ones(4).bool(), torch.ones(4, 5), torch.ones(4, 1).bool()])
def test_a_mask_of_another_kind_is_refused(mask):
    with pytest.raises(ValueError, match="mask must be bool of shape"):
        RunningMeanStd((3,)).update(torch.zeros(4, 5, 3), mask)
