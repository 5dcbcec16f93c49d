"""bfloat16: what it may change, and what it may not."""

import lightning.pytorch as pl
import pytest
import torch
from tensordict import TensorDict

from sf_torchrl import ActorCritic, APPOLoss, APPOModule, RolloutDataModule, SharedMemoryCollector
from sf_torchrl.config import LossConfig, NetworkConfig
from sf_torchrl.envs.factory import with_arguments
from sf_torchrl.envs.spaces import ActionSpec, EnvSpecs
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.network import supports_bfloat16

SHAPE = (3, 72, 128)
SPECS = EnvSpecs(
    name="an env",
    observation=(Feature(("observation",), "uint8", SHAPE),),
    action=ActionSpec(kind="discrete", n=4),
)
CORES = pytest.mark.parametrize("core", ["none", "gru", "lstm"])


def policy_in(precision, core="none", specs=SPECS):
    torch.manual_seed(0)
    layers = {"core": core, "rnn_size": 32, "nonlinearity": "relu"}
    return ActorCritic(specs, NetworkConfig(precision=precision, **layers))


def batch_for(policy, B=8, T=8):
    """Random pictures, acted on by the fp32 policy moved a little."""
    generator = torch.Generator().manual_seed(2)
    seen = torch.randint(0, 256, (B, T + 1, *SHAPE), generator=generator, dtype=torch.uint8)
    done = torch.rand(B, T, 1, generator=generator) < 0.1
    batch = TensorDict(
        {
            "observation": seen[:, :T],
            "action": torch.randint(0, 4, (B, T), generator=generator),
            "action_log_prob": torch.full((B, T), -1.4),
            "state_value": torch.zeros(B, T, 1),
            "next": {
                "observation": seen[:, 1:],
                "reward": torch.randn(B, T, 1, generator=generator),
                "done": done,
                "terminated": done,
            },
        },
        [B, T],
    )
    if policy.state is not None:
        batch["collector", "initial_state"] = torch.zeros(B, T, *policy.state.shape)
    return batch


def losses_and_gradient(policy, batch):
    policy.zero_grad()
    found = APPOLoss(policy, LossConfig(normalize_advantage=False))(batch)
    (found["loss_objective"] + found["loss_critic"] + found["loss_entropy"]).backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])


@CORES
def test_losses_and_gradient_in_pieces_are_those_of_plain_fp32(core):
    """Against one piece, contiguous weights: torch as anybody writes it."""
    policy = policy_in("float32", core)
    batch = batch_for(policy)
    found, gradient = losses_and_gradient(policy, batch)
    plain = policy_in("float32", core)
    plain.to(memory_format=torch.contiguous_format)
    for part in plain.network.torso.encoder.parts:
        part._rows_per_piece = 10_000
    expected, expected_gradient = losses_and_gradient(plain, batch)
    for key in expected.keys():  # noqa: SIM118
        torch.testing.assert_close(found[key], expected[key], atol=1e-5, rtol=1e-5)
    difference = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert difference < 1e-4


@CORES
def test_losses_and_gradient_in_bfloat16_are_close_to_fp32(core):
    """Losses to 2 %, the gradient's direction to 0.99, parameters and gradients in float32."""
    exact, rounded = policy_in("float32", core), policy_in("bfloat16", core)
    batch = batch_for(exact)
    expected, expected_gradient = losses_and_gradient(exact, batch)
    found, gradient = losses_and_gradient(rounded, batch)
    for key in ("loss_objective", "loss_critic", "loss_entropy"):
        torch.testing.assert_close(found[key], expected[key], atol=2e-3, rtol=2e-2)
    assert torch.cosine_similarity(gradient, expected_gradient, dim=0) > 0.99
    assert not torch.equal(gradient, expected_gradient)
    assert {p.dtype for p in rounded.parameters()} == {torch.float32}


@CORES
def test_what_comes_out_is_float32(core):
    policy = policy_in("bfloat16", core)
    rows = [torch.zeros(3, *SHAPE, dtype=torch.uint8)]
    state = None if policy.state is None else torch.zeros(3, *policy.state.shape)
    params, _, log_prob, value, *after = policy.network.act(rows, True, state)
    assert {x.dtype for x in (params, log_prob, value, *after)} == {torch.float32}


def ratio_deviations(precision, core, num_workers=0):
    env = with_arguments("doom_basic", {"width": 64, "height": 48})
    policy = ActorCritic.for_env(env, precision=precision, core=core, rnn_size=64)
    collector = SharedMemoryCollector(
        env,
        policy,
        frames_per_batch=256,
        num_workers=num_workers,
        num_envs_per_worker=8 // max(1, num_workers),
        rollout_length=32,
        async_mode=False,
        total_frames=512,
        seed=0,
    )
    return [APPOLoss(policy)(batch)["ratio_deviation_max"].item() for batch in collector]


@CORES
def test_at_zero_lag_every_ratio_from_pictures_is_one(core):
    assert max(ratio_deviations("float32", core)) < 1e-5


@pytest.mark.multiprocess
def test_at_zero_lag_every_ratio_from_pictures_is_one_across_processes():
    assert max(ratio_deviations("float32", "gru", num_workers=2)) < 1e-5


@CORES
def test_in_bfloat16_ratios_at_zero_lag_stay_close_to_one(core):
    assert max(ratio_deviations("bfloat16", core)) < 0.03


def test_auto_is_bfloat16_for_pictures_where_the_processor_has_it():
    vector = EnvSpecs(
        name="an env",
        observation=(Feature(("observation",), "float32", (4,)),),
        action=ActionSpec(kind="discrete", n=4),
    )
    assert policy_in("auto").network.uses_bfloat16("cpu") == supports_bfloat16()
    assert not policy_in("auto", specs=vector).network.uses_bfloat16("cpu")
    assert policy_in("bfloat16", specs=vector).network.uses_bfloat16("cpu")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_autocast_around_the_network_changes_nothing(precision):
    policy = policy_in(precision)
    rows = [torch.full((3, *SHAPE), 7, dtype=torch.uint8)]
    with torch.no_grad():
        alone = policy.evaluate(rows)
        with torch.autocast("cpu", torch.bfloat16):
            inside = policy.evaluate(rows)
    for one, other in zip(alone, inside, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_precision_of_the_trainers_is_refused(precision, tmp_path):
    module = APPOModule(policy_in("float32"))
    collector = SharedMemoryCollector("CartPole-v1", frames_per_batch=64, num_workers=0)
    trainer = pl.Trainer(
        precision=precision,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    with pytest.raises(ValueError, match=r"model\.network\.precision"):
        trainer.fit(module, RolloutDataModule(collector))
