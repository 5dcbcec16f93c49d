"""Policies of the kinds that TorchRL's collectors take. Imported by inference workers."""

from functools import partial

from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical
from torchrl.envs import GymEnv
from torchrl.modules import (
    MLP,
    ActorValueOperator,
    EGreedyModule,
    GRUModule,
    LSTMModule,
    ProbabilisticActor,
    QValueActor,
    ValueOperator,
)


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
