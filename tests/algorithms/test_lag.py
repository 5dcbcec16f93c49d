"""Which steps are fresh, and what is reported about the others."""

import pytest
import torch

from sf_torchrl.algorithms.lag import is_fresh, lag_stats


@pytest.mark.parametrize(("lag", "fresh"), [(0, True), (20, True), (21, False), (-1, False)])
def test_lag_bound_is_inclusive(lag, fresh):
    version = torch.tensor([[100 - lag]])
    assert is_fresh(version, learner_version=100, max_policy_lag=20).item() is fresh


def test_every_step_is_judged_by_its_own_version():
    version = torch.tensor([[10, 9, 8], [7, 11, 10]])
    want = torch.tensor([[True, True, False], [False, False, True]])
    assert torch.equal(is_fresh(version, learner_version=10, max_policy_lag=1), want)


def test_with_a_bound_of_zero_only_the_learners_own_version_is_fresh():
    version = torch.tensor([[4, 5, 6]])
    assert is_fresh(version, 5, max_policy_lag=0).tolist() == [[False, True, False]]


def test_versions_beyond_what_float32_can_count_are_told_apart():
    version = torch.tensor([[2**24, 2**24 + 1, 2**53 + 1]])
    assert is_fresh(version, 2**24 + 1, max_policy_lag=0).tolist() == [[False, True, False]]
    assert is_fresh(version, 2**53 + 1, max_policy_lag=0).tolist() == [[False, False, True]]


@pytest.mark.parametrize("extreme", [torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max])
def test_a_version_that_makes_no_sense_is_not_fresh(extreme):
    assert not is_fresh(torch.tensor([[extreme]]), 100, max_policy_lag=10**9).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_versions_must_be_int64(dtype):
    with pytest.raises(ValueError, match="must be int64"):
        is_fresh(torch.zeros(2, 3, dtype=dtype), 0, 0)
    with pytest.raises(ValueError, match="must be int64"):
        lag_stats(torch.zeros(2, 3, dtype=dtype), 0, 0)


def test_statistics_by_hand():
    stats = lag_stats(torch.tensor([[10, 9], [7, 4]]), learner_version=10, max_policy_lag=3)
    assert stats.mean.item() == 2.5
    assert stats.max.item() == 6
    assert stats.dropped_fraction.item() == 0.25


def test_the_dropped_are_those_that_are_not_fresh():
    version = torch.randint(0, 50, (8, 9), generator=torch.Generator().manual_seed(0))
    fresh = is_fresh(version, 40, 15)
    stats = lag_stats(version, 40, 15)
    torch.testing.assert_close(stats.dropped_fraction, 1 - fresh.double().mean())
    torch.testing.assert_close(stats.mean, (40 - version).double().mean())
    assert stats.max == (40 - version).max()


@pytest.mark.parametrize("garbage", [-(10**12), 10**12, torch.iinfo(torch.int64).min])
def test_steps_that_are_not_counted_change_no_statistic(garbage):
    mask = torch.tensor([[True, False], [True, True]])
    clean = lag_stats(torch.tensor([[10, 0], [7, 4]]), 10, 3, mask)
    dirty = lag_stats(torch.tensor([[10, garbage], [7, 4]]), 10, 3, mask)
    assert [float(x) for x in clean] == [float(x) for x in dirty] == [3.0, 6.0, 1 / 3]


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_without_a_step_to_count_all_is_zero(shape):
    stats = lag_stats(torch.ones(shape).long(), 10, 3, torch.zeros(shape).bool())
    assert [float(x) for x in stats] == [0.0, 0.0, 0.0]


def test_statistics_are_scalars_of_stated_types():
    for version in (torch.ones(2, 3).long(), torch.ones(0, 3).long()):
        stats = lag_stats(version, 10, 3)
        assert [x.shape for x in stats] == [torch.Size()] * 3
        assert [x.dtype for x in stats] == [torch.float64, torch.int64, torch.float64]


@pytest.mark.parametrize("mask", [torch.ones(2).bool(), torch.ones(2, 1).bool(), torch.ones(2, 3)])
def test_a_mask_of_another_kind_is_refused(mask):
    with pytest.raises(ValueError, match="mask must be bool of shape"):
        lag_stats(torch.ones(2, 3).long(), 10, 3, mask)
