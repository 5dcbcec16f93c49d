"""The table in docs/torchrl.md is what TorchRL's Collector takes and what ours answers."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    ReplayBufferEnsemble,
)
from torchrl.weight_update import RPCWeightSyncScheme, SharedMemWeightSyncScheme

from sf_torchrl import SharedMemoryCollector
from sf_torchrl.collection.arguments import NOT_TAKEN

PAGE = Path(__file__).parents[2] / "docs" / "torchrl.md"
SECTION = PAGE.read_text().split("## Every argument", 1)[1].split("\n## ", 1)[0]
TABLE = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|$", SECTION, re.MULTILINE))
OURS = inspect.signature(SharedMemoryCollector).parameters
THEIRS = {
    name: parameter
    for name, parameter in inspect.signature(Collector.__init__).parameters.items()
    if name not in ("self", "kwargs")
}

ASKING_FOR_MORE = {
    "backend": "process",
    "backend_options": {"num_threads": 2},
    "num_collectors": 2,
    "sync": True,
    "device": "cuda:0",
    "env_device": "cuda:0",
    "reset_at_each_iter": True,
    "return_same_td": True,
    "reset_when_done": False,
    "interruptor": object(),
    "use_buffers": True,
    "extend_buffer": False,
    "trust_policy": True,
    "compile_policy": {"mode": "default"},
    "cudagraph_policy": True,
    "no_cuda_sync": True,
    "weight_updater": object(),
    "weight_recv_schemes": {"policy": SharedMemWeightSyncScheme()},
    "worker_idx": 0,
    "auto_register_policy_transforms": False,
}


def make(**kwargs):
    options = {"frames_per_batch": 64, "num_workers": 0, **kwargs}
    return SharedMemoryCollector("CartPole-v1", **options)


def test_the_table_has_every_argument_of_torchrls_collector():
    assert list(TABLE) == list(THEIRS)


def test_what_the_table_calls_supported_is_an_argument_and_the_rest_is_answered():
    supported = {name for name, words in TABLE.items() if words.startswith("supported")}
    assert supported == THEIRS.keys() & OURS.keys()
    assert THEIRS.keys() - supported == NOT_TAKEN.keys() == ASKING_FOR_MORE.keys()


def test_torchrls_defaults_are_accepted():
    defaults = {
        name: parameter.default
        for name, parameter in THEIRS.items()
        if parameter.default is not inspect.Parameter.empty and name != "policy"
    }
    del defaults["track_policy_version"]  # False leaves the key out: tested elsewhere
    make(**defaults).shutdown()


@pytest.mark.parametrize("name", ASKING_FOR_MORE)
def test_what_is_not_done_is_refused_in_one_line_that_names_it(name, family):
    with pytest.raises(ValueError, match=f"{name}=") as refusal:
        make(**{name: ASKING_FOR_MORE[name]}, num_workers=1)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) > len(name) + 25  # and says what to do
    assert family.members() == {}


def test_what_torchrl_does_not_know_either_is_a_type_error():
    with pytest.raises(TypeError, match="frames_per_bach"):
        make(frames_per_bach=3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"frames_per_batch": 100}, "frames_per_batch=100 must be a multiple of rollout_length=32"),
        ({"policy": len, "policy_factory": len}, "both policy and policy_factory"),
        ({"max_frames_per_traj": 0}, "max_frames_per_traj=0"),
        ({"trajs_per_batch": 0}, "trajs_per_batch=0"),
        ({"traj_format": "cat"}, "need trajs_per_batch"),
        ({"trajs_per_batch": 2, "traj_format": "dense"}, "traj_format='dense'"),
        ({"trajs_per_batch": 2, "track_traj_ids": False}, "needs track_traj_ids"),
        ({"track_traj_ids": False, "split_trajs": True}, "track_traj_ids"),
        ({"replay_buffer": object()}, "must be a torchrl.data.ReplayBuffer, got object"),
        (
            {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(63))},
            "holds 63 steps, a batch frames_per_batch=64",
        ),
        (
            {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(100, ndim=3))},
            "has ndim=3",
        ),
        (
            {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(64)), "split_trajs": True},
            "split_trajs cannot",
        ),
        (
            {"weight_sync_schemes": {"critic": SharedMemWeightSyncScheme()}},
            "names the model 'critic'",
        ),
        (
            {"weight_sync_schemes": {"policy": RPCWeightSyncScheme()}},
            "RPCWeightSyncScheme does not",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments, words, family):
    with pytest.raises(ValueError, match=re.escape(words)):
        make(**arguments, num_workers=1)
    assert family.members() == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"trajs_per_batch": 2, "trajs_per_write": 2},  # and no buffer to write into
        {"track_policy_version": object()},  # TorchRL's PolicyVersion: a counter of the user's
        {"init_random_frames": -5},
        {"exploration_type": "random"},
        {"exploration_type": None},
    ],
)
def test_what_would_have_no_effect_is_refused(arguments, family):
    with pytest.raises(ValueError, match=list(arguments)[-1]):
        make(**arguments, num_workers=1)
    assert family.members() == {}


def test_trajectories_are_written_one_at_least(family):
    buffer = ReplayBuffer(storage=LazyTensorStorage(640))
    with pytest.raises(ValueError, match="trajs_per_write=0"):
        make(replay_buffer=buffer, trajs_per_batch=2, trajs_per_write=0)


def test_a_buffer_that_holds_other_data_is_refused():
    buffer = ReplayBuffer(storage=LazyTensorStorage(640))
    first = make(replay_buffer=buffer)
    next(iter(first))
    first.shutdown()
    make(replay_buffer=buffer).shutdown()  # the same kind goes on
    with pytest.raises(ValueError, match=r"differ in .*observation"):
        SharedMemoryCollector(
            "Pendulum-v1", frames_per_batch=64, num_workers=0, replay_buffer=buffer
        )


def rollouts():
    """Two, as this collector makes them."""
    collector = make()
    batch = collector.fake_tensordict()
    collector.shutdown()
    return batch


@pytest.mark.parametrize(
    ("buffer", "content"),
    [
        (LazyTensorStorage(640), lambda: rollouts().reshape(-1).double()),
        (LazyTensorStorage(640), lambda: torch.zeros(3, 4)),
        (LazyTensorStorage(640, ndim=2), lambda: rollouts()[:1]),
        (ListStorage(640), lambda: [1, 2, 3]),
    ],
    ids=["other dtypes", "a tensor", "other rollouts", "numbers"],
)
def test_a_buffer_with_incompatible_content_is_refused(buffer, content, family):
    buffer = ReplayBuffer(storage=buffer)
    buffer.extend(content())
    with pytest.raises(ValueError, match="replay_buffer"):
        make(replay_buffer=buffer, num_workers=1)
    assert family.members() == {}


def test_a_buffer_that_cannot_be_written_is_refused(family):
    part = ReplayBuffer(storage=LazyTensorStorage(640))
    fixed = ReplayBuffer(storage=LazyTensorStorage(640), writer=ImmutableDatasetWriter())
    for buffer in (ReplayBufferEnsemble(part, part, batch_size=8), fixed):
        with pytest.raises(ValueError, match="replay_buffer"):
            make(replay_buffer=buffer, num_workers=1)
    assert family.members() == {}
