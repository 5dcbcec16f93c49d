"""Rollouts cut into stretches, against a walk over them in plain Python."""

import pytest
import torch

from sf_torchrl.algorithms.stretches import cut_into_stretches, episode_begins, known_state


def walked(begins, mask):
    """Stretches as lists of (rollout, step), and how each one's first step is reached."""
    found = []
    for b in range(begins.shape[0]):
        previous = None
        for t in range(begins.shape[1]):
            if mask is not None and not mask[b, t]:
                previous = None
                continue
            if previous is None or begins[b, t]:
                found.append([])
            found[-1].append((b, t))
            previous = t
    return found


def random_case(seed, masked, B=6, T=11):
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(B, T, generator=generator) < 0.2
    mask = None
    if masked:
        mask = known_state(torch.rand(B, T, generator=generator) < 0.8, begins)
    return begins, mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_stretches_are_those_of_a_walk_over_the_rollouts(seed, masked):
    begins, mask = random_case(seed, masked)
    expected = walked(begins, mask)
    cut = cut_into_stretches(begins, mask)
    keep = torch.ones_like(begins) if mask is None else mask
    steps = [tuple(step) for step in keep.nonzero().tolist()]
    found = [[] for _ in cut.rollout]
    for row, stretch in enumerate(cut.of_row.tolist()):
        found[stretch].append(steps[row])
    assert sorted(found) == sorted(expected)
    assert [len(stretch) for stretch in found] == sorted(map(len, found), reverse=True)
    assert cut.rollout.tolist() == [stretch[0][0] for stretch in found]
    assert cut.begins_rollout.tolist() == [stretch[0][1] == 0 for stretch in found]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_packing_puts_step_n_of_every_stretch_side_by_side_and_back_again(seed, masked):
    cut = cut_into_stretches(*random_case(seed, masked))
    rows = torch.arange(len(cut.order))
    assert torch.equal(rows[cut.order][cut.positions], rows)
    unpacked, _ = torch.nn.utils.rnn.pad_packed_sequence(
        torch.nn.utils.rnn.PackedSequence(rows[cut.order], cut.batch_sizes), padding_value=-1
    )
    for stretch, column in enumerate(unpacked.T):
        assert column[column >= 0].tolist() == (cut.of_row == stretch).nonzero()[:, 0].tolist()


def test_state_is_unknown_from_a_masked_step_to_the_next_episode():
    mask = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 1]], dtype=torch.bool)
    begins = torch.tensor([[0, 0, 0, 0, 1, 0, 0, 0]], dtype=torch.bool)
    expected = [[1, 1, 0, 0, 1, 1, 0, 0]]
    assert known_state(mask, begins).int().tolist() == expected


def test_what_a_masked_step_says_of_itself_is_not_believed():
    mask = torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)
    for lie in (False, True):
        begins = torch.tensor([[False, lie, False, True]])
        assert known_state(mask, begins).int().tolist() == [[1, 0, 0, 1]]


def test_without_is_init_an_episode_begins_after_a_done_that_is_not_masked():
    done = torch.tensor([[0, 1, 0, 1, 0]], dtype=torch.bool)
    mask = torch.tensor([[1, 0, 1, 1, 1]], dtype=torch.bool)
    assert episode_begins(None, done, None).int().tolist() == [[0, 0, 1, 0, 1]]
    assert episode_begins(None, done, mask).int().tolist() == [[0, 0, 0, 0, 1]]
    is_init = torch.tensor([[1, 0, 1, 0, 0]], dtype=torch.bool)
    assert episode_begins(is_init, done, mask) is is_init
