"""Which steps are fresh, and what is reported about the others."""

import pytest
import torch

from sf_torchrl.algorithms.lag import is_fresh


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
