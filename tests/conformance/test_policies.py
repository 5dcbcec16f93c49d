"""Every kind of policy that TorchRL's collectors take."""

from functools import partial

import pytest
import torch
from kinds import POLICIES, cartpole, choosing
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Bounded, Composite
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import (
    RandomPolicy,
)
from torchrl.testing.mocking_classes import CountingEnv, MultiKeyCountingEnv, NestedCountingEnv

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", POLICIES)
def test_every_out_key_is_in_the_batch(make_collector, name):
    policy = POLICIES[name]()
    batch = next(iter(make_collector("CartPole-v1", policy)))
    for key in policy.out_keys:
        assert key in batch.keys(include_nested=True), key
        assert batch.get(key).shape[:2] == (4, 5)


@pytest.mark.multiprocess
def test_the_inference_worker_runs_it_as_this_process_does(make_collector):
    """Recurrent ones: see test_recurrent."""
    torch.manual_seed(0)
    policy = POLICIES["actor and value"]()
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


def test_what_a_factory_makes_anew_has_the_weights_of_this_process(make_collector):
    """Each call draws other weights; only those of ``collector.policy`` count."""
    collector = make_collector("CartPole-v1", policy_factory=POLICIES["actor"])
    batch = next(iter(collector))
    with torch.no_grad():
        expected = collector.policy(batch.select("observation"))["logits"]
    torch.testing.assert_close(batch["logits"], expected)


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
        ((["observation"], ["reward"]), "but no 'action'"),
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


class Outputs(nn.Module):
    """Gives the action and two things more, without names."""

    def forward(self, observation):
        total = observation.sum(-1)
        return (total > 0).long(), total, -total


def test_more_outputs_of_a_wrapped_module_get_torchrls_names(make_collector):
    """TorchRL: TestAutoWrap::test_auto_wrap_modules."""
    batch = next(iter(make_collector("CartPole-v1", Outputs())))
    total = batch["observation"].sum(-1)
    torch.testing.assert_close(batch["output1"], total)
    torch.testing.assert_close(batch["output2"], -total)


class ReadsPixels(nn.Module):
    def forward(self, pixels):
        return pixels


def test_a_module_that_reads_no_observation_is_refused_with_the_names(make_collector):
    """TorchRL: TestAutoWrap::test_auto_wrap_error."""
    with pytest.raises(ValueError, match=r"(?s)ReadsPixels.*observation"):
        make_collector("CartPole-v1", ReadsPixels())


def test_what_a_policy_returns_need_not_be_what_it_was_given(make_collector):
    """TorchRL: test_collector_outplace_policy."""

    def act(tensordict):
        action = torch.ones(*tensordict.batch_size, 1, dtype=torch.int32)
        return TensorDict({"action": action}, tensordict.batch_size)

    batch = next(iter(make_collector(partial(CountingEnv, max_steps=4), act)))
    assert (batch["observation"][..., 0] == torch.arange(5)).all()


def test_what_a_policy_selects_of_its_out_keys_is_stored(make_collector):
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(4, 8), ["observation"], ["hidden"]),
        choosing(TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"])),
        selected_out_keys=["action", "action_log_prob"],
    )
    batch = next(iter(make_collector("CartPole-v1", policy)))
    assert {"action", "action_log_prob"} <= set(batch.keys())
    assert not {"hidden", "logits"} & set(batch.keys())


def counting_up(key):
    """A policy for NestedCountingEnv that writes its action under ``key``."""
    return TensorDictModule(lambda states: torch.ones_like(states), [("data", "states")], [key])


nested = partial(NestedCountingEnv, max_steps=3)  # three agents


def test_nested_actions_are_written_where_the_env_reads_them(make_collector):
    """TorchRL: TestNestedEnvsCollector."""
    policy = counting_up(("data", "action"))
    batch = next(iter(make_collector(nested, policy, num_envs_per_worker=4)))
    assert (batch["data", "states"][..., 0, 0] == torch.tensor([0, 1, 2, 3, 0])).all()


@pytest.mark.parametrize("nest_obs_action", [True, False])
@pytest.mark.parametrize("nest_done", [True, False])
@pytest.mark.parametrize("nest_reward", [True, False])
def test_what_is_nested_and_what_is_not_may_be_mixed(
    make_collector, nest_obs_action, nest_done, nest_reward
):
    """TorchRL: test_collector_nested_env_combinations."""
    observation = ("data", "states") if nest_obs_action else "observation"
    action = ("data", "action") if nest_obs_action else "action"
    policy = TensorDictModule(lambda seen: torch.ones_like(seen), [observation], [action])
    make = partial(
        NestedCountingEnv,
        max_steps=3,
        nest_obs_action=nest_obs_action,
        nest_done=nest_done,
        nest_reward=nest_reward,
    )
    batch = next(iter(make_collector(make, policy, num_envs_per_worker=1))).reshape(-1)
    theirs = Collector(make(), policy, frames_per_batch=20, total_frames=20)
    expected = next(iter(theirs))
    theirs.shutdown()
    for key, value in expected.items(include_nested=True, leaves_only=True):
        assert torch.equal(batch[key], value), key


def test_an_action_in_another_place_than_the_envs_is_refused(make_collector):
    with pytest.raises(ValueError, match=r"no .*data.*action"):
        make_collector(nested, counting_up("action"))


def test_every_action_of_an_env_with_several_is_the_policys(make_collector):
    """TorchRL: TestMultiKeyEnvsCollector::test_collector."""
    policy = TensorDictModule(
        lambda o, first, second: (
            torch.tensor([False, True]).expand(len(o), 2),
            torch.ones(first.shape[:-1], dtype=torch.int64),
            torch.zeros_like(second[..., :1]),
        ),
        ["observation", ("nested_1", "observation"), ("nested_2", "observation")],
        ["action", ("nested_1", "action"), ("nested_2", "azione")],
    )
    make = partial(MultiKeyCountingEnv, max_steps=30)
    batch = next(iter(make_collector(make, policy, num_envs_per_worker=4)))
    steps = torch.arange(5)
    assert (batch["observation"].flatten(2) == steps[:, None]).all()
    assert (batch["nested_1", "observation"].flatten(2) == steps[:, None]).all()
    assert (batch["nested_2", "observation"] == 0).all()


def test_an_output_that_is_no_tensor_is_refused(make_collector):
    policy = TensorDictModule(
        lambda o: (torch.ones(len(o), dtype=torch.int64), "left"),
        ["observation"],
        ["action", "words"],
    )
    with pytest.raises(ValueError, match="words"):
        make_collector("CartPole-v1", policy)
