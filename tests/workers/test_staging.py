"""Rows on their way to the policy's device and back."""

import numpy as np
import pytest
import torch

from sf_torchrl import ActorCritic, APPOLoss, SharedMemoryCollector
from sf_torchrl.workers import inference_worker
from sf_torchrl.workers.staging import DeviceRows, HostRows, check_device, rows_for

CPU = torch.device("cpu")


def leaves():
    generator = np.random.default_rng(0)
    return [
        generator.integers(0, 256, (3, 2, 5, 4), np.uint8),
        generator.normal(size=(3, 2, 5)).astype(np.float32),
    ]


@pytest.mark.parametrize("rows", [HostRows(), DeviceRows(CPU)], ids=["host", "staged"])
@pytest.mark.parametrize("where", [[(1, 4)], [(0, 0), (2, 3), (1, 1)], [(2, 2), (0, 4)]], ids=len)
def test_rows_of_all_envs_of_a_slot_lie_together_in_the_order_of_requests(rows, where):
    for _ in range(2):  # the second time in memory that is there already
        found = rows.gather(leaves(), where)
        for leaf, gathered in zip(leaves(), found, strict=True):
            expected = np.concatenate([leaf[slot, :, t] for slot, t in where])
            assert torch.equal(gathered, torch.from_numpy(expected))


def test_answers_come_back_as_they_are_whatever_their_number():
    rows = DeviceRows(CPU)
    for count in (4, 2, 9):
        answers = [torch.arange(count), torch.randn(count, 3)]
        for fetched, answer in zip(rows.fetch(answers), answers, strict=True):
            assert np.array_equal(fetched, answer.numpy())


def test_the_cpu_needs_no_staging():
    assert isinstance(rows_for(CPU), HostRows)
    assert isinstance(rows_for(torch.device("cuda")), DeviceRows)


@pytest.mark.parametrize("core", ["none", "gru"])
def test_a_collector_gathers_the_same_through_staging(core, monkeypatch):
    """What a GPU would be given, on the CPU."""

    def first_batches():
        torch.manual_seed(0)
        policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(8,), core=core, rnn_size=8)
        collector = SharedMemoryCollector(
            "CartPole-v1", policy, frames_per_batch=64, total_frames=192, num_workers=0, seed=0
        )
        found = torch.stack(list(collector))
        assert all(APPOLoss(policy)(batch)["ratio_deviation_max"] < 1e-5 for batch in found)
        return found

    plain = first_batches()
    monkeypatch.setattr(inference_worker, "rows_for", DeviceRows)
    staged = first_batches()
    assert (plain == staged).all()


@pytest.mark.parametrize("device", ["cdua", "cuda:99", "cuda:-5"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"policy_device='{device}' cannot be used here"):
        check_device("policy_device", device)


def test_a_collector_refuses_it_before_anything_starts(family):
    with pytest.raises(ValueError, match="policy_device='cuda:99'"):
        SharedMemoryCollector("CartPole-v1", frames_per_batch=64, policy_device="cuda:99")
    assert family.members() == {} or family.env_workers() == []
