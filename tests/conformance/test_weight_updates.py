"""Every way to renew the weights of every kind of policy."""

import pytest
import torch
from kinds import POLICIES, actor
from tensordict import TensorDict
from torch import nn
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def weights_of(policy):
    """A module's weights in every form in which they may be given."""
    yield "module", policy
    yield "TensorDict", TensorDict.from_module(policy)
    yield "data", TensorDict.from_module(policy).data
    yield "state dict", policy.state_dict()


@pytest.mark.parametrize("name", POLICIES)
def test_weights_are_taken_in_every_form(make_collector, name):
    policy = POLICIES[name]()
    collector = make_collector("CartPole-v1", policy)
    batches = iter(collector)
    next(batches)
    key = {"greedy": "action_value", "actor and value": "state_value"}.get(name, "logits")
    for count, form in enumerate(dict(weights_of(policy))):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(0.0)
            list(policy.parameters())[-1].fill_(count + 1.0)  # the last bias is the output
        collector.update_policy_weights_(dict(weights_of(policy))[form])
        batch = next(batches)
        assert (batch["policy_version"] == count + 1).all()
        assert (batch[key] == count + 1.0).all()
    for how in ({}, {"policy": policy}, {"weights": policy.state_dict()}):
        collector.update_policy_weights_(**how)
    collector.update_policy_weights_(weights_dict={"policy": policy})
    assert collector.policy_version == collector.get_policy_version() == count + 5


def test_weights_of_another_network_are_refused(make_collector):
    collector = make_collector("CartPole-v1", actor())
    with pytest.raises(ValueError, match="weights lack"):
        collector.update_policy_weights_(nn.Linear(4, 2))
    with pytest.raises(ValueError, match="model_id='critic'"):
        collector.update_policy_weights_(actor(), model_id="critic")
    with pytest.raises(ValueError, match="worker_ids=0"):
        collector.update_policy_weights_(actor(), worker_ids=0)


@pytest.mark.parametrize("scheme", [SharedMemWeightSyncScheme, MultiProcessWeightSyncScheme])
def test_weight_sync_schemes_are_accepted(make_collector, scheme):
    policy = actor()
    collector = make_collector("CartPole-v1", policy, weight_sync_schemes={"policy": scheme()})
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    for how in ({}, {"policy_or_weights": policy}, {"weights_dict": {"policy": policy}}):
        collector.update_policy_weights_(**how)
        assert (next(batches)["logits"] == 0).all()
    assert collector.policy_version == 3


def test_a_scheme_that_sends_nothing_sends_nothing(make_collector):
    schemes = {"policy": NoWeightSyncScheme()}
    collector = make_collector("CartPole-v1", actor(), weight_sync_schemes=schemes)
    collector.update_policy_weights_()
    assert collector.policy_version == 0


def test_the_version_can_be_raised_without_new_weights(make_collector):
    collector = make_collector("CartPole-v1", actor())
    collector.increment_version()
    assert (next(iter(collector))["policy_version"] == 1).all()


def test_weights_said_twice_or_by_an_unknown_name_are_refused(make_collector):
    policy = actor()
    collector = make_collector("CartPole-v1", policy)
    with pytest.raises(ValueError, match="weights"):
        collector.update_policy_weights_(policy, weights=policy.state_dict())
    with pytest.raises(ValueError, match="policy"):
        collector.update_policy_weights_(weights_dict={"policy": policy}, policy=policy)
    with pytest.raises(ValueError, match="critic"):
        collector.update_policy_weights_(weights_dict={"critic": policy})
    assert collector.policy_version == 0


def test_an_argument_of_an_update_that_means_nothing_is_refused(make_collector):
    collector = make_collector("CartPole-v1", actor())
    with pytest.raises(TypeError, match="weigths"):
        collector.update_policy_weights_(weigths=actor())  # else the old ones would be published


def test_weights_of_an_operator_are_those_of_its_parts(make_collector):
    """As PPO has it: an ActorValueOperator, of which the policy operator collects."""
    both = POLICIES["actor and value"]()
    collector = make_collector("CartPole-v1", both.get_policy_operator())
    batches = iter(collector)
    next(batches)
    with torch.no_grad():
        for parameter in both.parameters():
            parameter.zero_()
    for weights in (None, both.get_policy_operator(), both.get_policy_operator().state_dict()):
        collector.update_policy_weights_(weights)
        assert (next(batches)["logits"] == 0).all()
