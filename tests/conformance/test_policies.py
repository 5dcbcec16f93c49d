"""Every kind of policy that TorchRL's collectors take."""

import pytest
import torch
from kinds import POLICIES, cartpole, choosing
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torchrl.data import Bounded, Composite
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import (
    RandomPolicy,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", POLICIES)
def test_every_out_key_is_in_the_batch(make_collector, name):
    policy = POLICIES[name]()
    batch = next(iter(make_collector("CartPole-v1", policy)))
    for key in policy.out_keys:
        assert key in batch.keys(include_nested=True), key
        assert batch.get(key).shape[:2] == (4, 5)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["actor and value", "GRU on LSTM"])
def test_the_inference_worker_runs_it_as_this_process_does(make_collector, name):
    torch.manual_seed(0)
    policy = POLICIES[name]()
    with set_exploration_type(InteractionType.DETERMINISTIC):
        options = {"num_envs_per_worker": 1, "rollout_length": 60, "frames_per_batch": 60}
        here, there = (
            next(iter(make_collector("CartPole-v1", policy, num_workers=count, **options)))
            for count in (0, 1)
        )
    for key in policy.out_keys:
        torch.testing.assert_close(here.get(key), there.get(key))


class Leaning(nn.Module):
    """Reads an observation by its name."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, observation):
        return (self.scale * observation.sum(-1) > 0).long()


def on_tensordicts(tensordict):
    action = (tensordict["observation"].sum(-1) > 0).long()
    return tensordict.set("action", action).set("score", tensordict["step_count"].float())


@pytest.mark.parametrize(
    "policy", [Leaning(), lambda observation: (observation.sum(-1) > 0).long(), on_tensordicts]
)
def test_a_module_or_function_without_keys_is_wrapped(make_collector, policy):
    batch = next(iter(make_collector("CartPole-v1", policy)))
    assert (batch["action"] == (batch["observation"].sum(-1) > 0)).all()
    if policy is on_tensordicts:
        assert (batch["score"] == batch["step_count"]).all()


def test_weights_of_a_wrapped_module_go_by_its_own_names(make_collector):
    policy = Leaning()
    collector = make_collector("CartPole-v1", policy, num_envs_per_worker=1)
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        policy.scale.fill_(-1.0)
    for weights in (policy, policy.state_dict(), TensorDict.from_module(policy)):
        collector.update_policy_weights_(weights)
        batch = next(batches)
        assert (batch["action"] == (batch["observation"].sum(-1) < 0)).all()


@pytest.mark.parametrize("policy", [None, RandomPolicy(), RandomPolicy(Bounded(-0.5, 0.5, (1,)))])
def test_random_actions_are_spread_over_the_space(make_collector, policy):
    batch = next(iter(make_collector("Pendulum-v1", policy, frames_per_batch=400)))
    bound = 2.0 if policy is None or policy.action_spec is None else 0.5
    assert batch["action"].abs().max() <= bound
    assert batch["action"].max() > 0.9 * bound
    assert batch["action"].min() < -0.9 * bound


class Unsendable(nn.Linear):
    """Can neither be pickled nor copied."""

    def __reduce_ex__(self, protocol):
        raise TypeError("stays here")


def make_unsendable():
    net = Unsendable(4, 2)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, 0.0)
    net.bias.data[1] = 5.0
    return choosing(TensorDictModule(net, ["observation"], ["logits"]))


@pytest.mark.multiprocess
def test_a_factory_makes_what_cannot_be_sent(make_collector):
    with pytest.raises(ValueError, match=r"cannot be copied .*policy_factory"):
        make_collector("CartPole-v1", make_unsendable())
    collector = make_collector("CartPole-v1", policy_factory=make_unsendable, num_workers=1)
    batches = iter(collector)
    assert (next(batches)["logits"] == torch.tensor([0.0, 5.0])).all()
    with torch.no_grad():
        collector.policy.module[0].module.bias.fill_(3.0)
    collector.update_policy_weights_()
    batch = next(batch for batch in batches if batch["policy_version"].min() == 1)
    assert (batch["logits"] == 3.0).all()


def test_a_policy_acts_in_the_mode_it_is_given_in(make_collector):
    for training in (True, False):
        net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)).train(training)
        policy = choosing(TensorDictModule(net, ["observation"], ["logits"]))
        batch = next(iter(make_collector("CartPole-v1", policy)))
        with torch.no_grad():
            logits = net.eval()(batch["observation"])
        assert torch.allclose(logits, batch["logits"]) is not training


def test_a_policy_without_an_action_or_with_foreign_keys_is_refused(make_collector):
    for keys, words in (
        ((["observation"], ["value"]), r"writes \['value'\], but no 'action'"),
        ((["pixels"], ["action"]), r"reads \['pixels'\]; env 'CartPole-v1' observes"),
        ((["observation"], ["reward"]), "which a batch has already"),
    ):
        policy = TensorDictModule(nn.Linear(4, 2), *keys)
        with pytest.raises(ValueError, match=words):
            make_collector("CartPole-v1", policy)


def test_an_env_with_counters_of_its_own_feeds_the_policy(make_collector):
    """A policy may read what workers count, and what the env itself says."""
    policy = TensorDictModule(
        lambda count: (count[..., 0] % 2).long(), in_keys=["step_count"], out_keys=["action"]
    )
    for make in (cartpole, lambda: TransformedEnv(cartpole(), StepCounter(max_steps=6))):
        batch = next(iter(make_collector(make, policy)))
        assert (batch["action"] == batch["step_count"][..., 0] % 2).all()


def test_composite_specs_of_random_policies_are_taken(make_collector):
    spec = Composite(action=Bounded(0.25, 0.5, (1,)))
    batch = next(iter(make_collector("Pendulum-v1", RandomPolicy(spec))))
    assert ((batch["action"] >= 0.25) & (batch["action"] <= 0.5)).all()
