"""The learner under Lightning's Trainer: versions, lag, minibatches, resuming, shutting down."""

import copy
import logging

import gymnasium
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, SerialEnv

from sf_torchrl.collector import SharedMemoryCollector
from sf_torchrl.config import LearnerConfig, LossConfig
from sf_torchrl.data import RolloutDataModule
from sf_torchrl.memory.weights import WeightStore, named_weights
from sf_torchrl.models.actor_critic import ActorCritic
from sf_torchrl.module import APPOModule

pytestmark = pytest.mark.filterwarnings(
    # Lightning's progress over batches, with torch 2.13.
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
NAN = float("nan")


def make_policy(normalize_input=False, seed=0):
    torch.manual_seed(seed)
    return ActorCritic.for_env(
        "CartPole-v1", encoder_mlp_layers=(16,), normalize_input=normalize_input
    )


@torch.no_grad()
def make_batch(policy, B=8, T=6, seed=0, version=0):
    """A batch as a collector yields it, of random observations; ``version`` may be [B, T]."""
    g = torch.Generator().manual_seed(seed)
    batch = TensorDict({"observation": torch.randn(B, T, 4, generator=g)}, batch_size=[B, T])
    batch = policy(batch)
    done = torch.rand(B, T, 1, generator=g) < 0.2
    batch["next"] = TensorDict(
        {
            "observation": torch.randn(B, T, 4, generator=g),
            "reward": torch.randn(B, T, 1, generator=g),
            "done": done,
            "terminated": done,
            "truncated": torch.zeros_like(done),
        },
        batch_size=[B, T],
    )
    batch["policy_version"] = torch.as_tensor(version).expand(B, T).clone()
    return batch


def make_batches(policy, count, **kwargs):
    return [make_batch(policy, seed=seed, **kwargs) for seed in range(count)]


class Recorded:
    """A collector of batches that are given; notes what happens to it, in order."""

    def __init__(self, batches, policy, fail_at=None):
        self.batches = batches
        self.fail_at = fail_at
        self.position = 0
        self.iterated = 0
        self.events = []
        self.weight_store = Published(policy)
        self.total_frames = sum(batch.numel() for batch in batches)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.iterated += 1
        while self.position < len(self.batches):
            if self.position == self.fail_at:
                raise RuntimeError("the collector broke")
            self.events.append(("collect", self.position))
            self.position += 1
            yield self.batches[self.position - 1].clone()

    def shutdown(self):
        self.events.append("shutdown")

    def state_dict(self):
        return {"frames": self.position}

    def load_state_dict(self, state):
        self.position = state["frames"]


class Published:
    """A weight store that remembers every publication: version and weights."""

    def __init__(self, policy):
        self.store = WeightStore(policy)
        self.versions = []
        self.weights = []

    def publish(self, policy, version):
        self.store.publish(policy, version)
        self.versions.append(version)
        self.weights.append(snapshot(policy))


class Watched(APPOModule):
    """The learner, with a note of every training step, minibatch and optimizer step."""

    def __init__(self, *args, events=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.events = [] if events is None else events
        self.minibatches = []
        self.rates = []
        self.stepped = []
        self.loss.register_forward_pre_hook(lambda _, args: self.minibatches.append(args[0]))

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(
            lambda o, *_: self.rates.append([group["lr"] for group in o.param_groups])
        )
        optimizer.register_step_post_hook(lambda *_: self.stepped.append(snapshot(self.policy)))
        return optimizer

    def training_step(self, batch, batch_idx):
        self.events.append(("train", batch_idx))
        return super().training_step(batch, batch_idx)


def snapshot(module):
    return {name: value.detach().clone() for name, value in named_weights(module).items()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def differ(a, b):
    """Whether any weight or statistic differs."""
    return any(not torch.equal(a[name], b[name]) for name in a)


def make_trainer(**kwargs):
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**defaults | kwargs)


def fit(module, batches, ckpt_path=None, **kwargs):
    """Train on given batches; returns the Trainer and what was published."""
    collector = Recorded(batches, module.policy)
    trainer = make_trainer(**kwargs)
    trainer.fit(module, datamodule=RolloutDataModule(collector), ckpt_path=ckpt_path)
    return trainer, collector.weight_store


def serial_collector(policy, frames_per_batch=64, **kwargs):
    defaults = {"num_workers": 0, "num_envs_per_worker": 4, "rollout_length": 8, "seed": 5}
    return SharedMemoryCollector(
        "CartPole-v1", policy, frames_per_batch=frames_per_batch, **defaults | kwargs
    )


# Versions


def test_policy_version_is_the_number_of_optimizer_steps_and_lightnings_global_step():
    policy = make_policy()
    module = Watched(policy, learner=LearnerConfig(ppo_epochs=3, num_minibatches=2))
    trainer, _ = fit(module, make_batches(policy, 4))
    assert module.policy_version == trainer.global_step == len(module.stepped) == 4 * 3 * 2
    assert module.env_steps == 4 * 8 * 6
    assert module.train_batches == 4
    assert module.skipped_minibatches == 0


def test_every_optimizer_step_is_published_with_its_version_and_weights():
    policy = make_policy()
    begun_with = snapshot(policy)
    module = Watched(policy, learner=LearnerConfig(ppo_epochs=2, num_minibatches=2))
    _, published = fit(module, make_batches(policy, 2))
    assert published.versions == list(range(9))
    for weights, stepped in zip(published.weights, [begun_with, *module.stepped], strict=True):
        assert_same_bits(weights, stepped)
    assert differ(published.weights[0], snapshot(policy))


def test_what_others_pull_is_what_was_trained():
    policy = make_policy()
    module = APPOModule(policy)
    _, published = fit(module, make_batches(policy, 3))
    pulled = make_policy(seed=9)
    assert published.store.pull(pulled) == module.policy_version == 3
    assert_same_bits(snapshot(pulled), snapshot(policy))


def test_works_without_a_weight_store():
    policy = make_policy()
    module = APPOModule(policy)
    loader = Recorded(make_batches(policy, 3), policy)
    make_trainer(max_epochs=1).fit(module, train_dataloaders=loader)
    assert module.weight_store is None
    assert module.policy_version == 3


# Lag


def learner_at(version, policy, **learner):
    module = Watched(policy, learner=LearnerConfig(**learner))
    module.policy_version = version
    return module


def test_the_lag_bound_is_inclusive_and_the_future_is_not_fresh():
    policy = make_policy()
    version = torch.tensor([30, 20, 19, 31, 0, 25]).expand(8, 6)  # of lag 0, 10, 11, -1, 30, 5
    module = learner_at(30, policy, max_policy_lag=10)
    fit(module, [make_batch(policy, version=version)])
    (minibatch,) = module.minibatches
    want = torch.tensor([True, True, False, False, False, True])
    assert torch.equal(minibatch["mask"], want.expand(8, 6))
    (lag,) = module.recent_lag
    assert lag == (pytest.approx((0 + 10 + 11 - 1 + 30 + 5) / 6), 30, 0.5)


@pytest.mark.parametrize(("lag", "fresh"), [(0, True), (10, True), (11, False), (-1, False)])
def test_one_stale_step_in_a_batch_is_noticed(lag, fresh):
    policy = make_policy()
    version = torch.full((8, 6), 30)
    version[3, 2] -= lag
    module = learner_at(30, policy, max_policy_lag=10)
    fit(module, [make_batch(policy, version=version)])
    mask = module.minibatches[0].get("mask", torch.ones(8, 6, dtype=torch.bool))
    assert mask[3, 2] == fresh
    assert mask.sum() == 47 + fresh


def test_lag_is_as_of_the_batch_and_not_of_the_minibatch():
    policy = make_policy()
    module = Watched(policy, learner=LearnerConfig(max_policy_lag=0, num_minibatches=4))
    fit(module, [make_batch(policy)])
    assert module.policy_version == 4
    assert module.recent_lag[0].dropped_fraction == 0.0


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_stale_steps_change_no_weight_by_a_bit(garbage):
    policy = make_policy(normalize_input=True)
    version = torch.where(torch.rand(8, 6) < 0.3, 0, 50)
    module = learner_at(50, copy.deepcopy(policy), max_policy_lag=10)
    batch = make_batch(policy, version=version)
    dirty = batch.clone()
    for key in ("observation", "action_log_prob", "state_value", ("next", "reward")):
        dirty[key][version == 0] = garbage
    dirty["action"][version == 0] = -(2**40)
    fit(module, [batch])
    other = learner_at(50, copy.deepcopy(policy), max_policy_lag=10)
    fit(other, [dirty])
    assert_same_bits(snapshot(module.policy), snapshot(other.policy))
    assert differ(snapshot(module.policy), snapshot(policy))


def test_a_minibatch_of_stale_steps_is_skipped_and_counted():
    policy = make_policy()
    version = torch.tensor([0, 50, 0, 50]).repeat_interleave(2).view(8, 1)  # two rollouts each
    module = learner_at(50, policy, max_policy_lag=10, num_minibatches=4)
    begun_with = snapshot(policy)
    trainer, published = fit(module, [make_batch(policy, version=version)])
    assert module.skipped_minibatches == 2
    assert trainer.global_step == 2
    assert module.policy_version == 52
    assert published.versions == [50, 51, 52]
    assert_same_bits(published.weights[0], begun_with)


def test_a_batch_of_stale_steps_changes_nothing_but_the_count_of_env_steps():
    policy = make_policy(normalize_input=True)
    module = learner_at(50, policy, max_policy_lag=10, ppo_epochs=2)
    begun_with = snapshot(policy)
    batch = make_batch(policy)
    batch["observation"][:] = NAN
    trainer, published = fit(module, [batch])
    assert_same_bits(snapshot(policy), begun_with)
    assert (trainer.global_step, module.policy_version, module.skipped_minibatches) == (0, 50, 2)
    assert published.versions == [50]
    assert module.env_steps == 48


def test_the_learning_rate_is_scaled_by_the_unmasked_share_for_one_step_only():
    policy = make_policy()
    stale = torch.full((8, 6), 50)
    stale[:4, :3] = 0  # a quarter of the batch: half of the first of two minibatches
    module = learner_at(50, policy, max_policy_lag=10, num_minibatches=2, learning_rate=0.25)
    trainer, _ = fit(module, [make_batch(policy, version=stale)])
    assert module.rates == [[0.125], [0.25]]
    assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [0.25]


def test_a_smaller_rate_is_a_smaller_step():
    """Adam's first step is the learning rate, whatever the gradient."""
    policy = make_policy()
    version = torch.where(torch.arange(6) < 3, 0, 50).expand(8, 6)
    module = learner_at(50, policy, max_policy_lag=10, learning_rate=0.02, max_grad_norm=0)
    _, published = fit(module, [make_batch(policy, version=version)])
    before, after = published.weights
    steps = [(after[name] - before[name]).abs().max().item() for name in before]
    assert max(steps) == pytest.approx(0.01, rel=1e-3)


def test_batches_without_versions_have_no_lag():
    policy = make_policy()
    module = learner_at(50, policy, max_policy_lag=10)
    fit(module, [make_batch(policy).exclude("policy_version")])
    assert module.policy_version == 51
    assert not module.recent_lag


# Minibatches


def rollout_ids(minibatches):
    """Which rollouts each minibatch has, by their first observation."""
    return [batch["observation"][:, 0, 0].tolist() for batch in minibatches]


def numbered_batch(policy, B=8):
    batch = make_batch(policy, B=B)
    batch["observation"][:, 0, 0] = torch.arange(float(B))
    return batch


@pytest.mark.parametrize("shuffle", [False, True])
def test_minibatches_cover_every_rollout_once_a_pass(shuffle):
    policy = make_policy()
    learner = LearnerConfig(num_minibatches=4, ppo_epochs=3, shuffle_minibatches=shuffle)
    module = Watched(policy, learner=learner)
    fit(module, [numbered_batch(policy)])
    ids = rollout_ids(module.minibatches)
    assert [len(part) for part in ids] == [2] * 12
    passes = [[i for part in ids[4 * p : 4 * p + 4] for i in part] for p in range(3)]
    assert [sorted(order) for order in passes] == [list(range(8))] * 3
    if shuffle:
        assert passes[0] != passes[1] != passes[2] != passes[0]
        assert list(range(8)) not in passes
    else:
        assert passes == [list(range(8))] * 3


def test_shuffling_follows_the_seed():
    orders = []
    for seed in (1, 1, 2):
        pl.seed_everything(seed, verbose=False)
        policy = make_policy()
        torch.manual_seed(seed)
        learner = LearnerConfig(num_minibatches=4, shuffle_minibatches=True)
        module = Watched(policy, learner=learner)
        fit(module, [numbered_batch(policy)])
        orders.append(rollout_ids(module.minibatches))
    assert orders[0] == orders[1] != orders[2]


def test_minibatches_must_divide_the_rollouts():
    policy = make_policy()
    module = APPOModule(policy, learner=LearnerConfig(num_minibatches=3))
    with pytest.raises(ValueError, match="num_minibatches=3 must divide the 8 rollouts"):
        fit(module, make_batches(policy, 1))


def test_gae_is_computed_once_a_batch_with_the_weights_before_its_first_step():
    policy = make_policy()
    learner = LearnerConfig(num_minibatches=2, ppo_epochs=2, learning_rate=0.1)
    module = Watched(policy, LossConfig(with_vtrace=False), learner)
    batch = make_batch(policy)
    want = copy.deepcopy(module.loss).returns(batch.clone())
    fit(module, [batch])
    for index, minibatch in enumerate(module.minibatches):
        rows = slice(4 * (index % 2), 4 * (index % 2) + 4)
        for key in ("advantage", "value_target"):
            assert torch.equal(minibatch[key], want[key][rows])


def test_gradients_are_clipped_by_their_norm():
    policy = make_policy()
    gradient_norms = []

    class Module(APPOModule):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_pre_hook(
                lambda *_: gradient_norms.append(
                    torch.cat([p.grad.flatten() for p in self.policy.parameters()]).norm().item()
                )
            )
            return optimizer

    module = Module(policy, learner=LearnerConfig(max_grad_norm=1e-3))
    fit(module, make_batches(policy, 1))
    assert gradient_norms == [pytest.approx(1e-3, rel=1e-3)]
    assert module.last_metrics["train/grad_norm"] > 1e-2  # as it was before


# The normalizer


def statistics(weights):
    return {name: value for name, value in weights.items() if "normalizer." in name}


def merged(observations):
    """Mean and variance of one row of mean 0 and variance 1 together with these rows."""
    rows = observations.double().numpy().reshape(-1, 4)
    n, mean = len(rows), rows.mean(0)
    # Sample Factory's: the batch's variance enters with its unbiased estimate.
    spread = 1 + n * rows.var(0, ddof=1) + mean**2 * n / (n + 1)
    return mean * n / (n + 1), spread / (n + 1)


def test_the_normalizer_learns_from_unmasked_steps_only():
    policy = make_policy(normalize_input=True)
    version = torch.where(torch.rand(8, 6) < 0.3, 0, 50)
    module = learner_at(50, policy, max_policy_lag=10)
    batch = make_batch(policy, version=version)
    fit(module, [batch])
    mean, variance = merged(batch["observation"][version == 50])
    (part,) = policy.normalizer.parts
    np.testing.assert_allclose(part.mean.numpy(), mean, rtol=1e-5)
    np.testing.assert_allclose(part.var.numpy(), variance, rtol=1e-5)
    assert part.count == 1 + (version == 50).sum()


def test_the_normalizer_stands_still_during_the_optimizer_steps_of_a_batch():
    policy = make_policy(normalize_input=True)
    begun_with = statistics(snapshot(policy))
    module = Watched(policy, learner=LearnerConfig(ppo_epochs=2, num_minibatches=2))
    fit(module, make_batches(policy, 1))
    for weights in module.stepped:
        assert_same_bits(statistics(weights), begun_with)
    assert differ(statistics(snapshot(policy)), begun_with)


def test_the_normalizer_is_published_with_the_weights():
    """With the last publication of a batch, or with the first of the next."""
    policy = make_policy(normalize_input=True)
    batches = make_batches(policy, 2)
    _, published = fit(APPOModule(policy), batches)
    pulled = make_policy(normalize_input=True)
    published.store.pull(pulled)
    (part,) = pulled.normalizer.parts
    mean, _ = merged(batches[0]["observation"])
    both, _ = merged(torch.cat([batch["observation"] for batch in batches]))
    assert part.mean.tolist() in (pytest.approx(mean, rel=1e-5), pytest.approx(both, rel=1e-5))


def test_without_input_normalization_observations_change_no_buffer():
    policy = make_policy(normalize_input=False)
    assert not statistics(snapshot(policy))


# Zero lag


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multiprocess)])
def test_at_zero_lag_every_ratio_is_one(num_workers):
    """With a learning rate of 0, in every batch, episode ends included."""
    policy = make_policy()
    module = Watched(policy, learner=LearnerConfig(learning_rate=0.0))
    collector = serial_collector(
        policy, num_workers=num_workers, async_mode=False, total_frames=8 * 64
    )
    deviations = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module._next_diagnostics_s = 0.0  # for each batch, not twice a second
            deviations.append(pl_module.last_metrics["train/ratio_deviation_max"].item())

    make_trainer(callbacks=[Note()]).fit(module, datamodule=RolloutDataModule(collector))
    assert len(deviations) == 8
    assert max(deviations) < 1e-5
    assert any(batch["next", "done"].any() for batch in module.minibatches)
    assert [lag.max for lag in module.recent_lag] == [0] * 8
    assert module.policy_version == 8


# Checkpoints


def test_a_checkpoint_holds_tensors_and_plain_values_and_brings_the_counters_back(tmp_path):
    policy = make_policy(normalize_input=True)
    module = learner_at(50, policy, max_policy_lag=10, num_minibatches=4)
    version = torch.tensor([0, 50, 0, 50]).repeat_interleave(2).view(8, 1)
    trainer, _ = fit(module, [make_batch(policy, version=version)])
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)

    other = APPOModule(make_policy(normalize_input=True, seed=1))
    other.load_state_dict(saved["state_dict"])
    other.on_load_checkpoint(saved)
    counters = ("policy_version", "env_steps", "train_batches", "skipped_minibatches")
    assert [getattr(other, name) for name in counters] == [52, 48, 1, 2]
    assert_same_bits(snapshot(other.policy), snapshot(policy))


def learner_state(trainer, module):
    """Everything of the learner that the next batch depends on."""
    state = {f"policy.{k}": v for k, v in snapshot(module.policy).items()}
    (optimizer,) = trainer.optimizers
    for index, moments in optimizer.state_dict()["state"].items():
        state |= {f"adam.{index}.{name}": torch.as_tensor(v) for name, v in moments.items()}
    for name in ("policy_version", "env_steps", "train_batches", "skipped_minibatches"):
        state[name] = torch.tensor(getattr(module, name))
    return state | {"global_step": torch.tensor(trainer.global_step)}


@pytest.mark.parametrize("with_vtrace", [True, False], ids=["vtrace", "gae"])
def test_resuming_equals_never_having_stopped(tmp_path, with_vtrace):
    batches = make_batches(make_policy(normalize_input=True), 6)

    def learner(seed):
        policy = make_policy(normalize_input=True, seed=seed)
        return APPOModule(
            policy,
            LossConfig(with_vtrace=with_vtrace),
            LearnerConfig(ppo_epochs=2, num_minibatches=2, learning_rate=0.01),
        )

    whole = learner(0)
    trainer, _ = fit(whole, batches)
    want = learner_state(trainer, whole)

    path = tmp_path / "half.ckpt"
    trainer, _ = fit(learner(0), batches[:3])
    trainer.save_checkpoint(path)
    resumed = learner(1)  # other weights, all of which the checkpoint replaces
    trainer, published = fit(resumed, batches, ckpt_path=path)
    assert_same_bits(learner_state(trainer, resumed), want)
    assert published.versions == list(range(12, 25))


def test_resuming_a_real_run_continues_its_counters(tmp_path):
    path = tmp_path / "half.ckpt"
    policy = make_policy()
    module = APPOModule(policy)
    trainer = make_trainer()
    trainer.fit(module, datamodule=RolloutDataModule(serial_collector(policy, total_frames=192)))
    trainer.save_checkpoint(path)
    first_episodes = trainer.datamodule.collector.stats()["episodes"]
    assert (module.env_steps, module.policy_version) == (192, 3)

    policy = make_policy(seed=1)
    module = APPOModule(policy)
    versions = []
    collector = serial_collector(
        policy,
        total_frames=512,
        post_collect_hook=lambda batch: versions.append(batch["policy_version"]),
    )
    trainer = make_trainer()
    trainer.fit(module, datamodule=RolloutDataModule(collector), ckpt_path=path)
    assert (module.env_steps, module.policy_version, trainer.global_step) == (512, 8, 8)
    assert module.train_batches == 8
    stats = collector.stats()
    assert stats["frames"] == 512
    assert stats["episodes"] > first_episodes
    assert [version.unique().tolist() for version in versions] == [[3], [4], [5], [6], [7]]


def test_resuming_a_finished_run_trains_nothing_more(tmp_path):
    path = tmp_path / "end.ckpt"
    policy = make_policy()
    module = APPOModule(policy)
    trainer = make_trainer()
    trainer.fit(module, datamodule=RolloutDataModule(serial_collector(policy, total_frames=192)))
    trainer.save_checkpoint(path)
    want = learner_state(trainer, module)
    policy = make_policy(seed=1)
    module = APPOModule(policy)
    trainer = make_trainer()
    data = RolloutDataModule(serial_collector(policy, total_frames=192))
    trainer.fit(module, datamodule=data, ckpt_path=path)
    assert_same_bits(learner_state(trainer, module), want)


# Batches under Lightning


def test_nothing_is_collected_ahead():
    policy = make_policy()
    collector = Recorded(make_batches(policy, 3), policy)
    module = Watched(policy, events=collector.events)
    make_trainer().fit(module, datamodule=RolloutDataModule(collector))
    assert [event for event in collector.events if event != "shutdown"] == [
        (what, i) for i in range(3) for what in ("collect", "train")
    ]


def test_epochs_continue_one_collector_and_the_run_ends_with_it():
    policy = make_policy()
    collector = Recorded(make_batches(policy, 7), policy)
    module = Watched(policy, events=collector.events)
    trainer = make_trainer()
    trainer.fit(module, datamodule=RolloutDataModule(collector, batches_per_epoch=3))
    assert [event for event in collector.events if event != "shutdown"] == [
        event for i in range(7) for event in (("collect", i), ("train", i % 3))
    ]
    assert collector.iterated == 1
    assert trainer.current_epoch == 3


def test_a_run_ends_at_total_frames():
    policy = make_policy()
    module = APPOModule(policy)
    collector = serial_collector(policy, total_frames=300)  # reached within the fifth batch
    make_trainer().fit(module, datamodule=RolloutDataModule(collector))
    assert module.env_steps == 5 * 64


def test_an_endless_collector_ends_with_max_steps():
    policy = make_policy()
    module = APPOModule(policy)
    collector = serial_collector(policy, total_frames=-1)
    make_trainer(max_steps=4).fit(module, datamodule=RolloutDataModule(collector))
    assert module.env_steps == 4 * 64


class Broken(APPOModule):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise RuntimeError("the learner broke")


@pytest.mark.parametrize(
    ("learner", "fail_at", "message"),
    [(APPOModule, None, None), (Broken, None, "the learner"), (APPOModule, 1, "the collector")],
    ids=["normal end", "exception in training_step", "exception in the collector"],
)
def test_the_collector_is_shut_down_however_the_run_ends(learner, fail_at, message):
    policy = make_policy()
    collector = Recorded(make_batches(policy, 3), policy, fail_at=fail_at)
    data = RolloutDataModule(collector)
    if message is None:
        make_trainer().fit(learner(policy), datamodule=data)
    else:
        with pytest.raises(RuntimeError, match=message):
            make_trainer().fit(learner(policy), datamodule=data)
    assert collector.events[-1] == "shutdown"


class Counted(gymnasium.Env):
    """An env that knows how many of its kind are open."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    open = 0

    def __init__(self):
        Counted.open += 1

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, False, {}

    def close(self):
        Counted.open -= 1


@pytest.mark.parametrize("learner", [APPOModule, Broken])
def test_every_env_is_closed_after_the_run(learner):
    policy = make_policy()
    collector = SharedMemoryCollector(
        Counted, policy, frames_per_batch=64, total_frames=192, num_workers=0, rollout_length=8
    )
    try:
        make_trainer().fit(learner(policy), datamodule=RolloutDataModule(collector))
    except RuntimeError:
        assert learner is Broken
    assert Counted.open == 0


def test_fast_dev_run_trains_one_batch():
    policy = make_policy()
    module = APPOModule(policy)
    collector = serial_collector(policy, total_frames=10_000)
    make_trainer(fast_dev_run=True).fit(module, datamodule=RolloutDataModule(collector))
    assert module.train_batches == 1


@pytest.mark.parametrize("name", ["batches_per_epoch", "frame_skip"])
def test_numbers_that_are_not_positive_are_refused(name):
    policy = make_policy()
    with pytest.raises(ValueError, match=f"{name}=0"):
        RolloutDataModule(Recorded([], policy), **{name: 0})


def test_a_learner_needs_a_policy_or_what_one_is_made_from():
    with pytest.raises(ValueError, match="needs a policy, or env_specs"):
        APPOModule()


# Reproducibility


def trained_weights(seed):
    pl.seed_everything(seed, verbose=False)
    policy = ActorCritic.for_env("CartPole-v1", encoder_mlp_layers=(16,))
    module = APPOModule(
        policy,
        learner=LearnerConfig(
            ppo_epochs=2, num_minibatches=2, shuffle_minibatches=True, learning_rate=1e-3
        ),
    )
    collector = serial_collector(policy, total_frames=10 * 64, seed=None)
    make_trainer().fit(module, datamodule=RolloutDataModule(collector))
    return snapshot(policy)


def test_one_seed_gives_one_run_bit_for_bit_without_worker_processes():
    first, torch_draws = trained_weights(3), torch.rand(1)
    assert_same_bits(first, trained_weights(3))
    assert torch.equal(torch_draws, torch.rand(1))
    assert differ(first, trained_weights(4))


# With TorchRL's collector


def test_trains_on_torchrls_own_collector_and_renews_its_weights():
    policy = make_policy()
    acting = copy.deepcopy(policy)

    def make():
        return GymEnv("CartPole-v1", categorical_action_encoding=True)

    collector = Collector(
        SerialEnv(4, make),
        acting,
        frames_per_batch=64,
        total_frames=320,
        auto_register_policy_transforms=False,
    )
    module = Watched(policy, learner=LearnerConfig(learning_rate=0.01))
    trainer = make_trainer()
    trainer.fit(module, datamodule=RolloutDataModule(collector))
    assert (module.policy_version, module.env_steps, trainer.global_step) == (5, 320, 5)
    assert_same_bits(snapshot(acting), snapshot(policy))
    # Each batch was collected with the weights that the batch before led to.
    for batch, weights in zip(module.minibatches[1:], module.stepped, strict=False):
        policy.load_state_dict(weights)
        again = policy(batch.select("observation"))
        torch.testing.assert_close(again["state_value"], batch["state_value"])


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.multiprocess)])
def test_at_zero_lag_every_ratio_is_one_though_the_normalizer_learns(num_workers):
    """Who acts next normalizes as the learner will (learning rate 0)."""
    policy = make_policy(normalize_input=True)
    module = Watched(policy, learner=LearnerConfig(learning_rate=0.0, num_minibatches=2))
    collector = serial_collector(
        policy, num_workers=num_workers, async_mode=False, total_frames=8 * 64
    )
    deviations = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            pl_module._next_diagnostics_s = 0.0  # for each batch, not twice a second
            deviations.append(pl_module.last_metrics["train/ratio_deviation_max"].item())

    make_trainer(callbacks=[Note()]).fit(module, datamodule=RolloutDataModule(collector))
    assert len(deviations) == 8
    assert max(deviations) < 1e-5


@pytest.mark.parametrize("stale", [False, True], ids=["all fresh", "some stale"])
@pytest.mark.parametrize("key", ["mask", ("collector", "mask")], ids=["mask", "TorchRL's"])
def test_a_mask_that_comes_with_the_batch_holds_for_weights_and_normalizer(key, stale):
    policy = make_policy(normalize_input=True)
    version = torch.full((8, 6), 50)
    version[:, 5] = 0 if stale else 50
    batch = make_batch(policy, version=version)
    batch[key] = torch.rand(8, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    dirty = batch.clone()
    dirty["observation"][~batch[key]] = NAN
    trained = []
    for given in (batch, dirty):
        module = learner_at(50, copy.deepcopy(policy), max_policy_lag=10)
        fit(module, [given])
        trained.append(snapshot(module.policy))
    assert_same_bits(*trained)
    assert differ(trained[0], snapshot(policy))


def test_resuming_continues_the_shuffling(tmp_path):
    batches = make_batches(make_policy(), 6)

    def learner(seed):
        policy = make_policy(seed=seed)
        torch.manual_seed(7)
        settings = LearnerConfig(num_minibatches=2, learning_rate=0.01, shuffle_minibatches=True)
        return APPOModule(policy, learner=settings)

    whole = learner(0)
    trainer, _ = fit(whole, batches)
    want = learner_state(trainer, whole)
    path = tmp_path / "half.ckpt"
    trainer, _ = fit(learner(0), batches[:3])
    trainer.save_checkpoint(path)
    resumed = learner(1)
    trainer, _ = fit(resumed, batches, ckpt_path=path)
    assert_same_bits(learner_state(trainer, resumed), want)


def test_steps_of_a_torchrl_collector_that_tracks_versions_are_fresh():
    """It counts publications, of which the first comes before the first optimizer step."""
    policy = make_policy()
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    collector = Collector(
        env,
        copy.deepcopy(policy),
        frames_per_batch=64,
        total_frames=320,
        track_policy_version=True,
        auto_register_policy_transforms=False,
        postproc=lambda batch: batch.unsqueeze(0),  # [B, T]
    )
    module = APPOModule(policy)
    make_trainer().fit(module, datamodule=RolloutDataModule(collector))
    assert module.policy_version == 5
    assert max(lag.max for lag in module.recent_lag) <= 1  # TorchRL's label of a batch's first step
    assert [lag.dropped_fraction for lag in module.recent_lag] == [0.0] * 5
