"""Sampled or greedy, annealed or noisy: how a policy explores while it collects."""

import pytest
import torch
from family import Family
from kinds import greedy
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    AdditiveGaussianModule,
    NormalParamExtractor,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    TanhNormal,
)

from sf_torchrl import SharedMemoryCollector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def gaussian():
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        default_interaction_type=InteractionType.RANDOM,
    )


def is_mode(batch):
    return torch.allclose(batch["action"], 2 * batch["loc"].tanh(), atol=1e-5)


def is_best(batch):
    return bool((batch["action"] == batch["action_value"].argmax(-1)).all())


@pytest.mark.parametrize(
    ("kind", "is_greedy"), [(ExplorationType.DETERMINISTIC, True), (ExplorationType.RANDOM, False)]
)
def test_exploration_type_is_honoured(make_collector, kind, is_greedy):
    collector = make_collector("Pendulum-v1", gaussian(), exploration_type=kind)
    assert is_mode(next(iter(collector))) is is_greedy


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.multiprocess)])
def exploring(request):
    """A synchronous collector of a greedy policy, without and with worker processes."""
    with Family().adopting() as family:
        collector = SharedMemoryCollector(
            "CartPole-v1",
            greedy(),
            num_workers=request.param,
            num_envs_per_worker=2,
            num_splits=1,
            rollout_length=5,
            frames_per_batch=200,
            async_mode=False,
            seed=1,
        )
        try:
            yield collector, iter(collector)
        finally:
            collector.shutdown()
    family.assert_gone()


def test_the_type_around_an_iteration_goes_before_the_collectors(exploring):
    _, batches = exploring
    assert not is_best(next(batches))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert is_best(next(batches))
    assert not is_best(next(batches))


def test_an_annealed_exploration_reaches_the_workers(exploring):
    collector, batches = exploring
    assert not is_best(next(batches))
    exploration = collector.policy[-1]
    exploration.step(10)
    exploration.eps.fill_(0.0)
    collector.update_policy_weights_()
    assert is_best(next(batches))


def test_nothing_is_tried_out_where_the_mode_is_asked_for(make_collector):
    kind = ExplorationType.DETERMINISTIC
    collector = make_collector("CartPole-v1", greedy(), exploration_type=kind, frames_per_batch=200)
    assert is_best(next(iter(collector)))
    with set_exploration_type(ExplorationType.RANDOM):
        assert not is_best(collector.next())
    assert is_best(collector.next())


def still():
    net = nn.Linear(3, 1)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return TensorDictModule(net, ["observation"], ["action"])


def test_noise_that_a_policy_keeps_to_itself_goes_on_from_step_to_step(make_collector):
    spec = GymEnv("Pendulum-v1").action_spec
    noise = OrnsteinUhlenbeckProcessModule(spec=spec, sigma=0.3, theta=0.15, eps_end=1.0)
    policy = TensorDictSequential(still(), noise)
    batch = next(
        iter(make_collector("Pendulum-v1", policy, rollout_length=150, frames_per_batch=1200))
    )
    actions = batch["action"][..., 0]
    # A random walk: far smaller steps than values. White noise has larger ones.
    assert actions.diff(dim=1).std() < 0.5 * actions.std()
    assert not [key for key in list(batch.keys()) if key.startswith("_")]
    white = TensorDictSequential(still(), AdditiveGaussianModule(spec=spec))
    batch = next(
        iter(make_collector("Pendulum-v1", white, rollout_length=150, frames_per_batch=600))
    )
    assert batch["action"].diff(dim=1).std() > batch["action"].std()


def test_noise_begins_anew_with_an_episode(make_collector):
    spec = GymEnv("Pendulum-v1").action_spec
    noise = OrnsteinUhlenbeckProcessModule(spec=spec, sigma=0.3, theta=0.01, eps_end=1.0)
    collector = make_collector(
        "Pendulum-v1",
        TensorDictSequential(still(), noise),
        max_frames_per_traj=40,
        num_envs_per_worker=8,
        rollout_length=100,
        frames_per_batch=800,
    )
    batch = next(iter(collector))
    assert batch["is_init"].sum() == 3 * 8
    actions, step = batch["action"], batch["step_count"]
    assert actions[step <= 2].std() < 0.5 * actions[step >= 20].std()
