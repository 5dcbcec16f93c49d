"""Every kind of policy that TorchRL's collectors take, and every way to renew its weights."""

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.data import Bounded, Composite
from torchrl.envs import Compose, GymEnv, InitTracker, StepCounter, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    AdditiveGaussianModule,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    NormalParamExtractor,
    OrnsteinUhlenbeckProcessModule,
    ProbabilisticActor,
    QValueActor,
    RandomPolicy,
    TanhNormal,
    ValueOperator,
    set_recurrent_mode,
)
from torchrl.weight_update import (
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

T = 8


def cartpole():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def choosing(module, logits="logits"):
    """A sampled action from a module's logits."""
    return ProbabilisticActor(
        module, in_keys={"logits": logits}, distribution_class=Categorical, return_log_prob=True
    )


def actor():
    return choosing(TensorDictModule(MLP(4, 2, num_cells=[8]), ["observation"], ["logits"]))


def with_value():
    common = TensorDictModule(MLP(4, 8, num_cells=[8]), ["observation"], ["hidden"])
    head = choosing(TensorDictModule(nn.Linear(8, 2), ["hidden"], ["logits"]))
    return ActorValueOperator(common, head, ValueOperator(nn.Linear(8, 1), in_keys=["hidden"]))


def recurrent(*kinds):
    """Recurrent layers one after the other, each with a state of its own."""
    sizes, modules, key = [4], [], "observation"
    for index, kind in enumerate(kinds):
        state = f"state_{index}"
        keys = [key, state] if kind is GRUModule else [key, state, f"cell_{index}"]
        out = [f"features_{index}", *(("next", name) for name in keys[1:])]
        modules.append(kind(sizes[-1], 6, num_layers=2, in_keys=keys, out_keys=out))
        sizes.append(6)
        key = out[0]
    head = choosing(TensorDictModule(nn.Linear(6, 2), [key], ["logits"]))
    return TensorDictSequential(*modules, head)


def greedy():
    spec = cartpole().action_spec
    value = QValueActor(MLP(4, 2, num_cells=[8]), in_keys=["observation"], spec=spec)
    return TensorDictSequential(value, EGreedyModule(spec=spec, annealing_num_steps=10))


POLICIES = {
    "actor": actor,
    "actor and value": with_value,
    "GRU": partial(recurrent, GRUModule),
    "LSTM": partial(recurrent, LSTMModule),
    "GRU on LSTM": partial(recurrent, LSTMModule, GRUModule),
    "greedy": greedy,
}


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


# -- recurrent -----------------------------------------------------------------------------------


def primed(policy):
    """TorchRL's way: the env has a tracker and the policy's primers."""
    primers = [
        m.make_tensordict_primer() for m in policy.modules() if hasattr(m, "make_tensordict_primer")
    ]
    return TransformedEnv(cartpole(), Compose(InitTracker(), *primers))


RECURRENT = ["GRU", "LSTM", "GRU on LSTM"]


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("has_primers", [False, True])
def test_recurrent_states_are_those_of_a_hand_driven_env(make_collector, name, has_primers):
    """Over several rollouts and episodes: carried, and reset where an episode begins."""
    torch.manual_seed(0)
    policy = POLICIES[name]()
    make = partial(primed, policy) if has_primers else cartpole
    with set_exploration_type(InteractionType.DETERMINISTIC), torch.no_grad():
        collector = make_collector(
            make, policy, num_envs_per_worker=1, rollout_length=T, frames_per_batch=10 * T
        )
        batch = next(iter(collector)).reshape(-1)
        (seed,) = collector._engine._parts.env_seeds(0)
        env = primed(policy)
        env.set_seed(seed)
        current = env.reset(seed=seed)
        for step in batch:
            asked = policy(current)
            for key in policy.out_keys:
                torch.testing.assert_close(step.get(key), asked.get(key), msg=str(key))
            for key in policy.in_keys:
                torch.testing.assert_close(step.get(key), current.get(key), msg=str(key))
            _, current = env.step_and_maybe_reset(asked)
    assert batch["next", "done"].sum() >= 3


@pytest.mark.parametrize("name", RECURRENT)
def test_a_batch_can_be_run_through_as_sequences(make_collector, name):
    """What training does: one pass over [B, T] from the states that rollouts begin with."""
    policy = POLICIES[name]()
    batch = next(
        iter(make_collector("CartPole-v1", policy, rollout_length=30, frames_per_batch=240))
    )
    assert batch["is_init"][:, 1:].any()
    with set_recurrent_mode(True), torch.no_grad(), set_exploration_type(InteractionType.MODE):
        again = policy(batch.select(*policy.in_keys))
    torch.testing.assert_close(again["logits"], batch["logits"], rtol=1e-5, atol=1e-6)


def test_a_state_of_unknown_shape_is_refused(make_collector):
    module = nn.Linear(4, 2)
    policy = TensorDictModule(
        lambda observation, memory: (module(observation).argmax(-1), memory),
        ["observation", "memory"],
        ["action", ("next", "memory")],
    )
    with pytest.raises(ValueError, match=r"state \['memory'\] .*make_tensordict_primer"):
        make_collector("CartPole-v1", policy)


# -- other kinds ---------------------------------------------------------------------------------


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


# -- exploration ---------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("kind", "is_greedy"), [(ExplorationType.DETERMINISTIC, True), (ExplorationType.RANDOM, False)]
)
def test_exploration_type_is_honoured(make_collector, kind, is_greedy):
    collector = make_collector("Pendulum-v1", gaussian(), exploration_type=kind)
    assert is_mode(next(iter(collector))) is is_greedy


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multiprocess)])
def test_the_type_around_an_iteration_goes_before_the_collectors(make_collector, num_workers):
    options = {"async_mode": False} if num_workers else {}
    collector = make_collector("Pendulum-v1", gaussian(), num_workers=num_workers, **options)
    batches = iter(collector)
    assert not is_mode(next(batches))
    with set_exploration_type(ExplorationType.DETERMINISTIC):
        assert is_mode(next(batches))
    assert not is_mode(next(batches))


def test_an_annealed_exploration_reaches_the_workers(make_collector):
    policy = greedy()
    collector = make_collector("CartPole-v1", policy, frames_per_batch=200)
    batches = iter(collector)
    best = next(batches)
    assert (best["action"] != best["action_value"].argmax(-1)).any()
    policy[-1].step(10)
    policy[-1].eps.fill_(0.0)
    collector.update_policy_weights_()
    best = next(batches)
    assert (best["action"] == best["action_value"].argmax(-1)).all()


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


# -- weights -------------------------------------------------------------------------------------


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
    key = "action_value" if name == "greedy" else "logits"
    for count, form in enumerate(dict(weights_of(policy))):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.fill_(0.0)
            list(policy.parameters())[-1].fill_(count + 1.0)  # the last bias is the output
        collector.update_policy_weights_(dict(weights_of(policy))[form])
        batch = next(batches)
        assert (batch["policy_version"] == count + 1).all()
        if name != "actor and value":
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
