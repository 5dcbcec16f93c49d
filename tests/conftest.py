"""What all tests share. Its folder is importable: ``envs``, ``policies``, ``rollout_cases``..."""

import pytest
from family import Family


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker():
    """Python's, which TorchRL's buffers start: it is this process's, and no test's."""
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()


@pytest.fixture
def family():
    """The processes that this test starts; none may outlive it."""
    with Family().adopting() as family:
        yield family
    family.assert_gone()


@pytest.fixture
def make_collector(family):
    """``SharedMemoryCollector``, small unless told otherwise, shut down after the test."""
    from sf_torchrl import SharedMemoryCollector

    made = []

    def make(create_env_fn, policy=None, **options):
        small = {
            "num_workers": 0,
            "num_envs_per_worker": 2,
            "num_splits": 1,
            "rollout_length": 5,
            "frames_per_batch": 20,
            "seed": 1,
        }
        made.append(SharedMemoryCollector(create_env_fn, policy, **{**small, **options}))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown()
