"""Recurrent policies: their states in the batch are those of TorchRL's own way of stepping."""

from functools import partial

import pytest
import torch
from kinds import POLICIES, cartpole
from tensordict.nn import InteractionType, TensorDictModule
from torch import nn
from torchrl.envs import Compose, InitTracker, TransformedEnv
from torchrl.envs.utils import set_exploration_type
from torchrl.modules import (
    set_recurrent_mode,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

T = 8


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


@pytest.mark.multiprocess
def test_states_of_every_env_are_kept_apart_in_the_inference_worker(make_collector):
    """Two splits of two envs, over several batches: each rollout can be run through by itself."""
    policy = POLICIES["GRU on LSTM"]()
    collector = make_collector(
        "CartPole-v1",
        policy,
        num_workers=1,
        num_envs_per_worker=4,
        num_splits=2,
        rollout_length=15,
        frames_per_batch=120,
    )
    for _, batch in zip(range(3), collector, strict=False):
        with set_recurrent_mode(True), torch.no_grad():
            again = policy(batch.select(*policy.in_keys))
        torch.testing.assert_close(again["logits"], batch["logits"], rtol=1e-5, atol=1e-6)
    assert not batch["is_init"][:, 0].all()  # states have been carried over
