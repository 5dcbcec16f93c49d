"""The env worker: what it imports, and what a split of envs writes into its slots."""

import json
import os
import subprocess
import sys
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from envs import BoxActionEnv, CountingDictEnv, CountingEnv, Ledger, pixels_of
from family import Family

from sf_torchrl import SharedMemoryCollector
from sf_torchrl.envs.try_out import try_out
from sf_torchrl.memory.batch import BatchAssembler
from sf_torchrl.memory.slab import ENV, FINAL, OBSERVATION, POLICY, Feature, Slab, SlabLayout
from sf_torchrl.workers.raw_split import RawSplit
from sf_torchrl.workers.split import SlabViews, SplitParts

T = 7


# -- what is imported, what is started -----------------------------------------------------------


def in_a_fresh_interpreter(code):
    """What the code prints as JSON."""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


LOADED = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def test_an_env_worker_imports_neither_torch_nor_what_is_built_on_it():
    loaded = in_a_fresh_interpreter(f"import sf_torchrl.workers.env_worker; {LOADED}")
    assert {"gymnasium", "numpy", "sf_torchrl"} <= set(loaded)
    assert not {"torch", "tensordict", "torchrl", "lightning"} & set(loaded)


def test_the_inference_worker_imports_torch_and_little_else():
    loaded = in_a_fresh_interpreter(f"import sf_torchrl.workers.inference_worker; {LOADED}")
    assert "torch" in loaded
    assert not {"tensordict", "torchrl", "lightning"} & set(loaded)


def test_importing_the_package_imports_no_torch_and_starts_nothing():
    code = """
import os, threading, sf_torchrl
sf_torchrl.__all__, dir(sf_torchrl)
tasks = os.listdir("/proc/self/task")
children = [open(f"/proc/self/task/{task}/children").read() for task in tasks]
threads = threading.active_count()
import json, sys
print(json.dumps([len(tasks), threads, children, "torch" in sys.modules, "numpy" in sys.modules]))
"""
    assert in_a_fresh_interpreter(code) == [1, 1, [""], False, False]


def test_every_public_name_can_be_had_and_no_other():
    import sf_torchrl

    assert all(getattr(sf_torchrl, name).__name__ == name for name in sf_torchrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = sf_torchrl.Nonsense


@pytest.fixture(scope="module")
def live_worker():
    """An env worker of CartPole in the middle of a run, as ``/proc`` shows it."""
    with Family().adopting() as family, pytest.MonkeyPatch.context() as patch:
        for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"):
            patch.setenv(name, "1")
        collector = SharedMemoryCollector("CartPole-v1", num_workers=1, frames_per_batch=512)
        try:
            list(islice(collector, 3))
            (worker,) = family.env_workers()
            process = Path(f"/proc/{worker}")
            yield {
                "maps": (process / "maps").read_text(),
                "status": dict(
                    line.split(":", 1) for line in (process / "status").read_text().splitlines()
                ),
                "environ": dict(
                    entry.split("=", 1)
                    for entry in (process / "environ").read_text().split("\0")
                    if entry
                ),
                "leads its session": os.getsid(worker) == os.getpgid(worker) == worker,
            }
        finally:
            collector.shutdown()


@pytest.mark.multiprocess
def test_a_live_env_worker_has_no_torch_in_memory(live_worker):
    assert "numpy" in live_worker["maps"]
    assert "/memfd:sf_torchrl" in live_worker["maps"]
    assert "/torch/" not in live_worker["maps"]


@pytest.mark.multiprocess
def test_a_live_env_worker_is_small(live_worker):
    assert int(live_worker["status"]["VmRSS"].split()[0]) < 60_000  # kB
    assert int(live_worker["status"]["Threads"]) == 1


@pytest.mark.multiprocess
def test_a_live_env_worker_takes_itself_for_no_rank_and_computes_in_one_thread(live_worker):
    environ = live_worker["environ"]
    assert environ["OMP_NUM_THREADS"] == "1"
    assert not {"LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & environ.keys()


@pytest.mark.multiprocess
def test_a_live_env_worker_has_a_session_of_its_own(live_worker):
    assert live_worker["leads its session"]


# -- a split, in this process --------------------------------------------------------------------


class Rollouts:
    """One split over a slab of its own, driven by hand: actions in, batches out.

    ``k`` envs and ``num_slots`` slots belong to it; the slab has one slot more at either end.
    """

    def __init__(self, create_env_fn, k=2, num_slots=2, seed=0):
        specs = try_out(create_env_fn)
        shape = specs.action.shape
        self.actions = torch.int64 if specs.action.kind == "discrete" else torch.float32
        dtype = str(self.actions).removeprefix("torch.")
        self.slab = Slab(
            SlabLayout(
                num_workers=1,
                num_slots=num_slots + 2,
                envs_per_slot=k,
                rollout_length=T,
                observation=(*specs.observation, *specs.tracked),
                policy=(Feature(("action",), dtype, shape),),
            )
        )
        parts = SplitParts(
            create_env_fn=create_env_fn,
            specs=specs,
            views=SlabViews(self.slab, specs, ()),
            slots=tuple(range(1, num_slots + 1)),
            seeds=tuple(range(100, 100 + k)),
            first_traj_id=6,
            num_envs=10,
        )
        self.split = RawSplit(parts)
        self._rng = np.random.default_rng(seed)
        self._assembler = BatchAssembler(self.slab, k)
        self._k = k
        self.split.reset()

    def act(self):
        """Write random actions for the split's current step."""
        leaf = self.slab.numpy(POLICY, "action")[self.split.slot, :, self.split.step_index]
        if leaf.dtype == np.int64:
            leaf[...] = self._rng.integers(0, 2, leaf.shape)
        else:
            leaf[...] = self._rng.normal(0, 3, leaf.shape)

    def fill(self):
        """Step until the slot is full; return its index."""
        for step in range(T):
            assert self.split.step_index == step
            self.act()
            assert self.split.step() is (step == T - 1)
        return self.split.slot

    def batch_of(self, slot):
        """The rollouts in a slot, and the episodes that ended in them."""
        self._assembler.start()
        episodes = self._assembler.add(slot, 0, self._k)
        return self._assembler.finish(), episodes

    def take(self, count):
        """Rollouts one after the other, with their episodes; each slot is given back at once."""
        for _ in range(count):
            slot = self.fill()
            yield self.batch_of(slot)
            self.split.release(slot)
            assert self.split.begin_next()


LENGTHS = [1, 2, T - 1, T, T + 1, 2 * T, 3 * T + 2, (1, T, 2, 3 * T), (T - 1, 1)]


@pytest.mark.parametrize("ends", ["terminated", "truncated", "both", ("truncated", "terminated")])
@pytest.mark.parametrize("length", LENGTHS, ids=str)
def test_every_step_is_what_the_env_did_and_every_episode_is_counted(length, ends):
    rollouts = Rollouts(partial(CountingEnv, length=length, ends=ends), k=3)
    ledger, episodes = Ledger(length, ends), []
    for batch, ended in rollouts.take(20):
        ledger.follow(batch)
        episodes += [(episode.episode_return, episode.length) for episode in ended]
    assert ledger.num_steps == 20 * T * 3
    assert sorted(episodes) == sorted(ledger.episodes)
    assert len(episodes) > 0
    ledger.check_traj_ids()


def test_an_episode_far_longer_than_a_rollout_is_counted_whole():
    length = 50 * T + 3
    rollouts = Rollouts(partial(CountingEnv, length=length, ends="truncated"), k=1)
    ledger, episodes = Ledger(length, "truncated"), []
    for batch, ended in rollouts.take(160):
        ledger.follow(batch)
        episodes += [(episode.episode_return, episode.length) for episode in ended]
    assert [n for _, n in episodes] == [length] * 3
    assert episodes == ledger.episodes


def test_episodes_of_a_rollout_are_reported_in_the_order_of_their_ends():
    rollouts = Rollouts(partial(CountingEnv, length=(2, 3)), k=2)
    (_, episodes), *_ = rollouts.take(1)
    assert [episode.length for episode in episodes] == [2, 2, 3, 3, 2, 2]


def test_what_followed_the_last_step_of_an_episode_is_its_final_observation():
    rollouts = Rollouts(partial(CountingEnv, length=3), k=1)
    (batch, _), *_ = rollouts.take(1)
    following = batch["next", "observation"][0]
    current = batch["observation"][0]
    assert current[:, 2].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert following[:, 2].tolist() == [1, 2, 3, 1, 2, 3, 1]
    assert following[:, 1].tolist() == [0, 0, 0, 1, 1, 1, 2]  # of the episode that ended


def test_final_observations_are_written_at_ends_alone():
    rollouts = Rollouts(partial(CountingEnv, length=3), k=2)
    final = rollouts.slab.numpy(FINAL, "observation")
    final[...] = -7
    slot = rollouts.fill()
    written = (final[slot] != -7).any(axis=-1)
    assert written.tolist() == [[False, False, True, False, False, True, False]] * 2


@pytest.mark.parametrize(
    ("ends", "terminated", "truncated"),
    [("terminated", True, False), ("truncated", False, True), ("both", True, True)],
)
def test_terminated_and_truncated_are_kept_apart(ends, terminated, truncated):
    rollouts = Rollouts(partial(CountingEnv, length=4, ends=ends), k=1)
    (batch, _), *_ = rollouts.take(1)
    at_end = [False, False, False, True, False, False, False]
    following = batch["next"].squeeze(0)
    assert following["terminated"].squeeze(-1).tolist() == [x and terminated for x in at_end]
    assert following["truncated"].squeeze(-1).tolist() == [x and truncated for x in at_end]
    assert following["done"].squeeze(-1).tolist() == at_end


def test_a_slot_that_is_filled_again_keeps_no_end_of_its_last_rollout():
    rollouts = Rollouts(partial(CountingEnv, length=(1,) * T + (10**6,), ends="both"), num_slots=1)
    (full_of_ends, _), (none, _) = rollouts.take(2)
    assert full_of_ends["next", "done"].all()
    assert not none["next", "done"].any()
    assert not none["next", "terminated"].any()


def test_an_env_that_overwrites_its_observation_is_copied_in_time():
    options = {"length": 3, "ends": "truncated", "reuse_buffer": True}
    rollouts, ledger = Rollouts(partial(CountingEnv, **options), k=2), Ledger(3, "truncated")
    for batch, _ in rollouts.take(5):
        ledger.follow(batch)
    assert ledger.num_steps == 5 * T * 2


def test_trajectory_ids_are_counted_in_steps_of_all_envs():
    rollouts = Rollouts(partial(CountingEnv, length=3), k=2)
    (batch, _), *_ = rollouts.take(1)
    assert batch["collector", "traj_ids"].tolist() == [
        [6, 6, 6, 16, 16, 16, 26],
        [7, 7, 7, 17, 17, 17, 27],
    ]


def test_every_key_of_a_dict_is_written_and_kept_at_the_end():
    rollouts, ledger = Rollouts(partial(CountingDictEnv, length=4), k=2), Ledger(4)
    for batch, _ in rollouts.take(3):
        ledger.follow(batch, key="count")
        for part in (batch, batch["next"]):
            step = part["count"][..., 2].numpy()
            np.testing.assert_array_equal(part["speed"].numpy(), np.float32(step / 2))
            np.testing.assert_array_equal(part["camera", "pixels"].numpy(), pixels_of(step))


def test_continuous_actions_are_clipped_for_the_env_and_kept_as_they_were():
    rollouts = Rollouts(BoxActionEnv, k=2)
    (batch, _), *_ = rollouts.take(1)
    action = batch["action"]
    low, high = torch.tensor(BoxActionEnv.LOW), torch.tensor(BoxActionEnv.HIGH)
    assert ((action < low) | (action > high)).float().mean() > 0.3
    assert torch.equal(batch["next", "observation"], action.clamp(low, high))


# -- one owner -----------------------------------------------------------------------------------


def test_a_split_writes_no_slot_but_its_own_and_none_that_is_full():
    rollouts = Rollouts(partial(CountingEnv, length=3), k=2, num_slots=3)
    slab, split = rollouts.slab, rollouts.split
    leaves = [slab.numpy(*leaf.key) for leaf in slab.layout.leaves() if len(leaf.key) > 1]

    def contents(slot):
        return b"".join(leaf[slot].tobytes() for leaf in leaves)

    for foreign in (0, 4):
        for leaf in leaves:
            leaf[foreign] = 1
    foreign = {slot: contents(slot) for slot in (0, 4)}
    full = {}
    for _ in range(3):
        slot = rollouts.fill()
        full[slot] = contents(slot)
        split.begin_next()
    assert sorted(full) == [1, 2, 3]
    held = deque(full)
    for _ in range(10):  # one comes back, is filled, and the two others are as they were
        slot = held.popleft()
        split.release(slot)
        split.begin_next()
        assert rollouts.fill() == slot
        assert contents(slot) != full[slot]
        assert {other: contents(other) for other in held} == {other: full[other] for other in held}
        full[slot] = contents(slot)
        held.append(slot)
    assert {slot: contents(slot) for slot in (0, 4)} == foreign


def test_a_split_without_a_free_slot_waits_and_then_goes_on_where_it_was():
    rollouts = Rollouts(partial(CountingEnv, length=100), k=2, num_slots=2)
    split, observation = rollouts.split, rollouts.slab.numpy(OBSERVATION, "observation")
    first = rollouts.fill()
    assert split.begin_next()
    second = rollouts.fill()
    assert not split.begin_next()
    assert not split.begin_next()
    split.release(first)
    assert split.begin_next()
    assert (split.slot, split.step_index) == (first, 0)
    assert observation[first, :, 0].tolist() == observation[second, :, T].tolist()
    assert observation[first, :, 0, 2].tolist() == [2 * T, 2 * T]


def test_sums_of_rewards_are_kept_in_double_precision():
    rollouts = Rollouts(partial(CountingEnv, length=2), k=1)
    assert rollouts.slab.numpy(ENV, "episode_return").dtype == np.float64
    assert rollouts.slab.numpy(ENV, "episode_length").dtype == np.int64
