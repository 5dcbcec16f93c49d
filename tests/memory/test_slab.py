"""The slab: leaves that share one anonymous mapping and nothing else."""

import os
import pickle
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from sf_torchrl.memory.arena import ALIGNMENT, Arena
from sf_torchrl.memory.slab import (
    DONE,
    ENV,
    FINAL,
    MODE,
    OBSERVATION,
    POLICY,
    REWARD,
    WAITED,
    Feature,
    Slab,
    SlabLayout,
)

# Odd sizes, many dtypes, a scalar, a nested key, and keys that the slab has itself.
OBSERVATIONS = (
    Feature(("camera", "left"), "uint8", (3, 5, 7)),
    Feature(("speed",), "float32", ()),
    Feature(("exact",), "float64", (3,)),
    Feature(("touching",), "bool", (5,)),
    Feature(("reward",), "int16", (1,)),
    Feature(("action",), "int64", (2,)),
)
OUTPUTS = (
    Feature(("action",), "int64", ()),
    Feature(("logits",), "float32", (3,)),
    Feature(("state", "hidden"), "float16", (9,)),
)
LAYOUT = SlabLayout(
    num_workers=3,
    num_slots=5,
    envs_per_slot=3,
    rollout_length=7,
    observation=OBSERVATIONS,
    policy=OUTPUTS,
)
KEYS = [leaf.key for leaf in LAYOUT.leaves()]


def written_with_distinct_bytes(slab):
    """Fill every leaf with random bytes of its own; return what was written."""
    written = {}
    for index, key in enumerate(KEYS):
        leaf = slab.numpy(*key)
        rng = np.random.default_rng(index)
        if leaf.dtype == bool:
            values = rng.random(leaf.shape) < 0.5
        else:
            values = rng.integers(1, 100, leaf.shape).astype(leaf.dtype)
        leaf[...] = values
        written[key] = values
    return written


def span(array):
    """First and last address of an array, exclusive."""
    first = array.__array_interface__["data"][0]
    return first, first + array.nbytes


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_slot_has_a_row_an_env_and_a_column_a_step():
    slab = Slab(LAYOUT)
    assert slab.numpy(FINAL, "camera", "left").shape == (5, 3, 7, 3, 5, 7)
    assert slab.numpy(POLICY, "state", "hidden").shape == (5, 3, 7, 9)
    assert slab.numpy(ENV, "policy_version").shape == (5, 3, 7)
    assert slab.numpy(REWARD, "reward").shape == (5, 3, 7, 1)
    assert slab.numpy(DONE, "terminated").shape == (5, 3, 7, 1)


def test_observations_have_one_step_more():
    assert Slab(LAYOUT).numpy(OBSERVATION, "camera", "left").shape == (5, 3, 8, 3, 5, 7)


def test_every_feature_keeps_its_dtype():
    slab = Slab(LAYOUT)
    for feature in OBSERVATIONS:
        assert slab.numpy(OBSERVATION, *feature.key).dtype == feature.dtype
        assert slab.numpy(FINAL, *feature.key).dtype == feature.dtype
    for feature in OUTPUTS:
        assert slab.numpy(POLICY, *feature.key).dtype == feature.dtype
    assert slab.numpy(ENV, "policy_version").dtype == np.int64
    assert slab.numpy(ENV, "episode_return").dtype == np.float64


def test_every_process_has_a_place_for_its_waiting_time():
    assert Slab(LAYOUT).numpy(WAITED).shape == (LAYOUT.num_workers + 1,)


def test_leaves_begin_on_cache_lines_of_their_own_and_never_overlap():
    slab = Slab(LAYOUT)
    spans = sorted(span(slab.numpy(*key)) for key in KEYS)
    assert all(first % ALIGNMENT == 0 for first, _ in spans)
    lines = [(first // ALIGNMENT, -(-last // ALIGNMENT)) for first, last in spans]
    assert all(last <= following for (_, last), (following, _) in pairwise(lines))
    base, _ = span(np.frombuffer(slab.arena.buffer, np.uint8))
    assert base <= spans[0][0]
    assert spans[-1][1] <= base + slab.arena.nbytes


def test_what_is_written_to_one_leaf_is_read_from_it_alone():
    slab = Slab(LAYOUT)
    written = written_with_distinct_bytes(slab)
    assert len(written) == len(set(KEYS)) == 2 * len(OBSERVATIONS) + len(OUTPUTS) + 10
    for key, values in written.items():
        np.testing.assert_array_equal(slab.numpy(*key), values, err_msg=str(key))


def test_the_tensordict_shows_what_numpy_wrote():
    slab = Slab(LAYOUT)
    written = written_with_distinct_bytes(slab)
    views = slab.tensordict()
    assert views.batch_size == (5, 3)
    shown = set(views.keys(include_nested=True, leaves_only=True))
    assert shown == set(KEYS) - {(WAITED,), (MODE,)}
    for key in shown:
        np.testing.assert_array_equal(views[key].numpy(), written[key])


def test_numpy_shows_what_the_tensordict_writes_and_later_writes_of_numpy_show_in_it():
    slab = Slab(LAYOUT)
    views = slab.tensordict()
    views[POLICY, "logits"][2, 1, 6] = torch.tensor([1.5, -2.5, 3.5])
    assert slab.numpy(POLICY, "logits")[2, 1, 6].tolist() == [1.5, -2.5, 3.5]
    slab.numpy(OBSERVATION, "touching")[4, 2, 7] = [True, False, True, True, False]
    assert views[OBSERVATION, "touching"][4, 2, 7].tolist() == [True, False, True, True, False]


CHILD = """
import pickle, sys
layout, fd = pickle.load(sys.stdin.buffer)
from sf_torchrl.memory.slab import Slab
slab = Slab(layout, fd)
for leaf in layout.leaves():
    array = slab.numpy(*leaf.key)
    sys.stdout.buffer.write(array.tobytes())
    array[...] = ~array if array.dtype == bool else array + 1
"""


def test_another_process_reads_and_writes_the_same_bytes_through_one_descriptor():
    slab = Slab(LAYOUT)
    written = written_with_distinct_bytes(slab)
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps((LAYOUT, slab.arena.fd)),
        pass_fds=[slab.arena.fd],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert child.stdout == b"".join(written[key].tobytes() for key in KEYS)
    for key in KEYS:
        want = ~written[key] if written[key].dtype == bool else written[key] + 1
        np.testing.assert_array_equal(slab.numpy(*key), want)


def test_nothing_leads_to_the_memory_but_its_descriptor():
    before = set(os.listdir("/dev/shm"))
    slab = Slab(LAYOUT)
    assert os.fstat(slab.arena.fd).st_nlink == 0
    assert os.readlink(f"/proc/self/fd/{slab.arena.fd}") == "/memfd:sf_torchrl (deleted)"
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "sf_torchrl" in name]


def test_without_memfd_the_file_is_gone_from_its_directory_at_once(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    slab = Slab(LAYOUT)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(slab.arena.fd).st_nlink == 0
    written = written_with_distinct_bytes(slab)
    np.testing.assert_array_equal(Slab(LAYOUT, slab.arena.fd).numpy(*KEYS[0]), written[KEYS[0]])


def test_descriptors_do_not_grow_with_the_number_of_leaves():
    many = tuple(Feature((f"leaf {i}",), "float32", (2,)) for i in range(100))
    before = num_descriptors()
    small = Slab(LAYOUT)
    of_small = num_descriptors() - before
    before = num_descriptors()
    large = Slab(SlabLayout(**{**vars(LAYOUT), "observation": many}))
    assert num_descriptors() - before == of_small
    assert of_small <= 2  # the arena's, and mmap's own copy of it
    assert len(large.layout.leaves()) > 10 * len(small.layout.policy)


def test_closing_keeps_views_alive_and_leaves_no_descriptor_once_they_are_gone():
    before = num_descriptors()
    slab = Slab(LAYOUT)
    view = slab.numpy(REWARD, "reward")
    slab.close()
    slab.close()
    view[...] = 3.0
    assert (slab.numpy(REWARD, "reward") == 3.0).all()
    del slab, view
    assert num_descriptors() == before


@pytest.mark.parametrize("nbytes", [1, 64, 65, 10**6])
def test_new_memory_is_zero_and_costs_nothing_until_it_is_touched(nbytes):
    arena = Arena(nbytes)
    assert os.fstat(arena.fd).st_blocks == 0
    assert arena.nbytes >= nbytes
    array = np.frombuffer(arena.buffer, np.uint8)
    array[nbytes - 1] = 1
    assert os.fstat(arena.fd).st_blocks * 512 <= 2 * os.sysconf("SC_PAGE_SIZE")
    assert array.sum() == 1
