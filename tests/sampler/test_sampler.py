"""garage's sampler contract: mirrors its tests, and adds what its users suffered from."""

import os
import pickle
import time
import warnings

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from envs import BoxActionEnv, CountingEnv
from grid import (
    PATH_ACTIONS,
    Constant,
    Failing,
    Grid,
    Large,
    Lucky,
    Scripted,
)
from tensordict.nn import TensorDictModule
from torch import nn

from sf_torchrl.sampler import (
    DefaultWorker,
    EnvUpdate,
    EpisodeBatch,
    ExistingEnvUpdate,
    MultiprocessingSampler,
    NewEnvUpdate,
    SetTaskUpdate,
    StepType,
    WorkerFactory,
)
from sf_torchrl.workers.supervisor import WorkerError

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore:.*is no number.*")]

SEEN = [0, 4, 8, 9, 10, 11]


@pytest.fixture
def make_sampler():
    made = []

    def make(agents, envs, n_workers=2, max_episode_length=100, **kwargs):
        sampler = MultiprocessingSampler(
            agents, envs, n_workers=n_workers, max_episode_length=max_episode_length, **kwargs
        )
        made.append(sampler)
        return sampler

    yield make
    for sampler in made:
        sampler.shutdown_worker()


def pids(sampler):
    return [worker.child.process.pid for worker in sampler._workers]


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


# -- samples -------------------------------------------------------------------------------------


def test_obtain_samples_gives_whole_scripted_episodes_and_enough_of_them(make_sampler):
    sampler = make_sampler(Scripted(), Grid(), n_workers=4)
    batch = sampler.obtain_samples(0, 1000, agent_update=None)
    assert batch.num_steps >= 1000
    assert sampler.total_env_steps == batch.num_steps == len(batch.observations)
    for episode in batch.split():
        assert episode.observations[:, 0].tolist() == SEEN
        assert episode.actions.tolist() == PATH_ACTIONS
        assert episode.rewards.tolist() == [0, 0, 0, 0, 0, 1]
        assert episode.last_observations.tolist() == [[15]]
        assert episode.step_types.tolist() == [0, 1, 1, 1, 1, StepType.TERMINAL]
        assert episode.agent_infos["place"].tolist() == [1, 2, 3, 4, 5, 6]
        assert episode.env_infos["goal"].tolist() == [15] * 6


def test_an_episode_is_cut_off_at_max_episode_length(make_sampler):
    sampler = make_sampler(Scripted([1, 0]), Grid(), n_workers=1, max_episode_length=7)
    batch = sampler.obtain_samples(0, 20, None)
    assert set(batch.lengths.tolist()) == {7}
    for episode in batch.split():
        assert episode.step_types.tolist() == [0, 1, 1, 1, 1, 1, StepType.TIMEOUT]


def test_exact_episodes_come_in_the_order_of_workers(make_sampler):
    agents = [Constant(action) for action in (2, 0, 3, 1)]
    sampler = make_sampler(agents, Grid(), n_workers=4, max_episode_length=10)
    for obtain in (sampler.obtain_exact_episodes, sampler.obtain_exact_trajectories):
        batch = obtain(3, agent_update=agents)
        assert batch.num_episodes == 12
        expected = [action for action in (2, 0, 3, 1) for _ in range(3)]
        for action, episode in zip(expected, batch.split(), strict=True):
            assert set(episode.actions.tolist()) == {action}


def test_a_slow_reader_loses_no_episode(make_sampler):
    class Counting(Scripted):
        count = 0

        def reset(self):
            super().reset()
            self.count += 1

        def get_action(self, observation):
            action, _ = super().get_action(observation)
            return action, {"episode": self.count}

    sampler = make_sampler(Counting(), Grid(), n_workers=1)
    sampler._begin(None, None, quota=None)
    time.sleep(1.0)  # the worker fills its outbox and the socket, and waits
    seen = []
    while len(seen) < 3000:
        seen += [episode.agent_infos["episode"][0] for _, episode in sampler._take()]
    assert seen == list(range(1, len(seen) + 1))


def test_a_large_episode_is_handed_over_before_the_next_one_is_begun(make_sampler):
    sampler = make_sampler(Constant(1), Large(goal=2), n_workers=1)
    for _ in range(3):
        sampler.obtain_samples(0, 1, None)
    begun = sampler.obtain_exact_episodes(1, None).env_infos["episodes"][-1]
    assert begun <= 2 * 3 + 1  # each call's own, and at most one that nobody asked for


def test_exact_sampling_counts_episodes_where_a_rollout_is_several(make_sampler):
    class Twice(DefaultWorker):
        def rollout(self):
            return EpisodeBatch.concatenate(super().rollout(), super().rollout())

    sampler = make_sampler(Scripted(), Grid(), worker_class=Twice)
    assert sampler.obtain_exact_episodes(3, None).num_episodes == 2 * 3


# -- updates -------------------------------------------------------------------------------------


def test_parameters_are_set_in_every_worker_or_in_each_its_own(make_sampler):
    sampler = make_sampler(Constant(0), Grid(), max_episode_length=5)
    batch = sampler.obtain_exact_episodes(1, {"action": 3})
    assert set(batch.actions.tolist()) == {3}
    batch = sampler.obtain_exact_episodes(1, [{"action": 1}, {"action": 2}])
    assert [set(e.actions.tolist()) for e in batch.split()] == [{1}, {2}]
    batch = sampler.obtain_exact_episodes(1, None)  # kept
    assert [set(e.actions.tolist()) for e in batch.split()] == [{1}, {2}]
    batch = sampler.obtain_exact_episodes(1, [Constant(0), Constant(3)])  # replaced
    assert [set(e.actions.tolist()) for e in batch.split()] == [{0}, {3}]


def test_an_update_for_all_workers_is_pickled_once(make_sampler):
    class Counted:
        pickled = 0

        def __reduce__(self):
            Counted.pickled += 1
            return int, ()

    sampler = make_sampler(Constant(0), Grid(), n_workers=3, max_episode_length=2)
    sampler.obtain_exact_episodes(1, {"action": 1, "other": Counted()})
    assert Counted.pickled == 1


def test_an_episode_of_an_older_agent_is_never_returned(make_sampler):
    sampler = make_sampler(Constant(0), Grid(), n_workers=1, max_episode_length=3)
    for action in (1, 2, 3, 0) * 3:
        batch = sampler.obtain_samples(0, 5, {"action": action})
        assert set(batch.actions.tolist()) == {action}


def test_each_worker_can_be_given_a_task(make_sampler):
    goals = [1, 2]
    sampler = make_sampler(Constant(1), Grid(), max_episode_length=4)
    updates = [SetTaskUpdate(Grid, goal) for goal in goals]
    batch = sampler.obtain_exact_episodes(2, None, env_update=updates)
    assert batch.lengths.tolist() == [1, 1, 2, 2]
    assert np.var(batch.env_infos["goal"]) > 0
    again = sampler.obtain_exact_episodes(1, None)  # the task stays
    assert again.lengths.tolist() == [1, 2]


def test_envs_given_as_updates_functions_and_ids_are_made_in_the_workers(make_sampler):
    envs = [SetTaskUpdate(Grid, 1), NewEnvUpdate(lambda: Grid(goal=2))]
    batch = make_sampler(Constant(1), envs).obtain_exact_episodes(1, None)
    assert batch.lengths.tolist() == [1, 2]
    assert os.getpid() not in batch.env_infos["pid"]
    batch = make_sampler(Constant(1), "CartPole-v1", n_workers=1).obtain_exact_episodes(1, None)
    assert batch.observations.shape[1:] == (4,)


def test_a_new_env_takes_the_place_of_the_old_one(make_sampler):
    sampler = make_sampler(Constant(1), Grid(goal=3), n_workers=1)
    assert sampler.obtain_exact_episodes(1, None).lengths.tolist() == [3]
    assert sampler.obtain_exact_episodes(1, None, Grid(goal=1)).lengths.tolist() == [1]
    with pytest.warns(UserWarning, match="pickles a whole Grid"):
        batch = sampler.obtain_exact_episodes(1, None, ExistingEnvUpdate(Grid(goal=2)))
    assert batch.lengths.tolist() == [2]


def test_an_update_may_wrap_the_env_it_finds(make_sampler):
    class Limit(EnvUpdate):
        def __call__(self, old_env=None):
            return gymnasium.wrappers.TimeLimit(old_env, 2)

    sampler = make_sampler(Constant(0), Grid(), n_workers=1)
    batch = sampler.obtain_exact_episodes(1, None, Limit())
    assert batch.step_types.tolist() == [StepType.FIRST, StepType.TIMEOUT]


# -- agents --------------------------------------------------------------------------------------


def test_a_tensordict_policy_is_an_agent_and_takes_a_state_dict(make_sampler):
    class Greedy(nn.Linear):
        def forward(self, observation):
            scores = super().forward(observation.float())
            return scores.argmax(-1), scores

    def policy(action):
        net = Greedy(1, 4)
        nn.init.zeros_(net.weight)
        nn.init.zeros_(net.bias)
        net.bias.data[action] = 1.0
        return TensorDictModule(net, ["observation"], ["action", "scores"])

    sampler = make_sampler(policy(2), Grid(), n_workers=1, max_episode_length=3)
    batch = sampler.obtain_exact_episodes(1, None)
    assert batch.actions.tolist() == [2, 2, 2]
    assert batch.agent_infos["scores"].shape == (3, 4)
    batch = sampler.obtain_exact_episodes(1, policy(3).state_dict())
    assert batch.actions.tolist() == [3, 3, 3]


def test_a_tensordict_policys_actions_are_fitted_to_the_env_and_told_as_chosen(make_sampler):
    def act(observation):
        return torch.tensor([[9.0, 9.0] if observation.is_floating_point() else 0])

    policy = TensorDictModule(act, ["observation"], ["action"])
    sampler = make_sampler(policy, BoxActionEnv(), n_workers=1, max_episode_length=2)
    batch = sampler.obtain_exact_episodes(1, None)  # the envs refuse what is out of bounds
    assert batch.actions.tolist() == [[9.0, 9.0]] * 2
    batch = sampler.obtain_exact_episodes(1, None, CountingEnv(first_action=3))
    assert batch.actions.tolist() == [0] * 2


def test_an_env_that_writes_into_its_action_changes_nothing_that_is_told(make_sampler):
    def act(observation):
        return np.array([0.5, 2.0], np.float32)

    sampler = make_sampler(act, BoxActionEnv(), n_workers=1, max_episode_length=2)
    assert sampler.obtain_exact_episodes(1, None).actions.tolist() == [[0.5, 2.0]] * 2


def test_a_function_is_an_agent(make_sampler):
    sampler = make_sampler(lambda observation: 2 if observation[0] < 12 else 1, Grid(), n_workers=1)
    batch = sampler.obtain_exact_episodes(1, None)
    assert batch.observations[:, 0].tolist() == [0, 4, 8, 12, 13, 14]


def test_episodes_become_a_tensordict_in_torchrls_layout(make_sampler):
    sampler = make_sampler(Scripted(), Grid(), n_workers=1)
    found = sampler.obtain_exact_episodes(2, None).to_tensordict()
    assert found.batch_size == (12,)
    assert found["observation"][:, 0].tolist() == SEEN * 2
    assert found["next", "observation"][:, 0].tolist() == [*SEEN[1:], 15] * 2
    assert found["next", "terminated"][:, 0].tolist() == ([False] * 5 + [True]) * 2
    assert found["collector", "traj_ids"].tolist() == [0] * 6 + [1] * 6
    assert found["is_init"][:, 0].nonzero()[:, 0].tolist() == [0, 6]
    assert found["next", "reward"].dtype == torch.float32


def test_dict_observations_stay_dicts(make_sampler):
    sampler = make_sampler(lambda observation: 0, Lucky, n_workers=1)
    batch = sampler.obtain_exact_episodes(2, None)
    assert batch.observations["age"].tolist() == [[0, 0], [1, 1], [2, 2]] * 2
    assert batch.last_observations["age"].tolist() == [[3, 3]] * 2
    assert batch.to_tensordict()["number"].dtype == torch.float64


# -- seeds ---------------------------------------------------------------------------------------


def test_workers_have_different_seeds_and_a_seed_repeats_itself(make_sampler):
    def numbers():
        sampler = make_sampler(lambda observation: 0, Lucky, seed=5)
        batch = sampler.obtain_exact_episodes(2, None)
        return batch.observations["number"].reshape(2, 6)

    first, second = numbers(), numbers()
    assert (first == second).all()
    assert len(np.unique(first)) == first.size


def test_an_agent_sent_whole_at_every_call_draws_other_numbers_in_each(make_sampler):
    class Noisy(nn.Module):
        def get_action(self, observation):
            return int(torch.randint(4, ())), {}

    sampler = make_sampler(Noisy(), Grid(), n_workers=1, seed=1, max_episode_length=12)
    first, second = (sampler.obtain_exact_episodes(1, Noisy()).actions.tolist() for _ in range(2))
    assert first != second


def test_an_env_made_anew_at_every_call_is_seeded_otherwise_in_each_and_repeatably(make_sampler):
    def numbers():
        sampler = make_sampler(lambda observation: 0, Lucky, n_workers=1, seed=5)
        batches = [sampler.obtain_exact_episodes(1, None, NewEnvUpdate(Lucky)) for _ in range(3)]
        return [batch.observations["number"].tolist() for batch in batches]

    first, second = numbers(), numbers()
    assert first == second
    assert len({tuple(found) for found in first}) == 3


# -- failures ------------------------------------------------------------------------------------


def test_samples_go_on_without_a_worker_that_has_died(make_sampler):
    envs = [Grid(), Failing("raise")]
    sampler = make_sampler(Scripted(), envs)
    with pytest.warns(UserWarning, match="sampler worker 1 failed with .*the floor gave way"):
        batch = sampler.obtain_samples(0, 20_000, None)
    assert batch.num_steps >= 20_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        sampler.obtain_samples(0, 160, None)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "the floor gave way"),
        ("raise_and_hang_in_close", "the floor gave way"),
        ("kill", "SIGKILL"),
        ("kill_but_for_a_helper", "SIGKILL"),
    ],
)
def test_exact_sampling_tells_of_a_dead_worker_at_once(make_sampler, how, words):
    sampler = make_sampler(Scripted(), [Grid(), Failing(how)])
    with pytest.raises(WorkerError, match=f"sampler worker 1 .*{words}"):
        sampler.obtain_exact_episodes(2, None)
    sampler.shutdown_worker()


@pytest.mark.filterwarnings("ignore:sampler worker . failed")
def test_samples_of_dead_workers_alone_are_an_error(make_sampler):
    sampler = make_sampler(Scripted(), Failing("raise"), n_workers=2)
    with pytest.raises(WorkerError, match="the floor gave way"):
        sampler.obtain_samples(0, 1000, None)


def test_an_agent_that_cannot_take_an_update_is_told_of(make_sampler):
    sampler = make_sampler(Scripted(), Grid(), n_workers=1)
    with pytest.raises(WorkerError, match="Scripted has no set_param_values"):
        sampler.obtain_samples(0, 1, {"action": 1})


def test_a_worker_in_the_middle_of_a_hanging_episode_is_ended(make_sampler):
    sampler = make_sampler(Scripted(), [Grid(), Failing("hang")])
    sampler.obtain_samples(0, 100, None)
    running = pids(sampler)
    sampler.shutdown_worker()
    assert not any(is_running(pid) for pid in running)


@pytest.mark.timeout(20)
def test_parameters_too_large_for_a_socket_wait_for_no_hanging_worker(make_sampler):
    envs = [Grid(goal=2), Failing("hang", at=6)]
    sampler = make_sampler(Constant(1), envs, max_episode_length=5)
    large = {"action": 1, "other": np.zeros(1_000_000)}
    sampler.obtain_exact_episodes(1, None)
    sampler.obtain_samples(0, 10_000, None)  # meanwhile the other hangs in its second episode
    for _ in range(3):
        sampler.obtain_samples(0, 100, large)
    running = pids(sampler)
    sampler.shutdown_worker()
    assert not any(is_running(pid) for pid in running)


# -- life ----------------------------------------------------------------------------------------


def test_idle_workers_and_the_waiting_sampler_use_no_processor(make_sampler):
    sampler = make_sampler(Scripted(), Grid())
    sampler.obtain_samples(0, 100, None)
    time.sleep(0.2)
    processes = [psutil.Process(pid) for pid in (*pids(sampler), os.getpid())]

    def seconds():
        return [sum(process.cpu_times()[:2]) for process in processes]

    before = seconds()
    time.sleep(1.0)
    assert max(b - a for a, b in zip(before, seconds(), strict=True)) < 0.05 * 1.0


def test_shutting_down_ends_every_worker_and_may_be_repeated(make_sampler):
    sampler = make_sampler(Scripted(), Grid())
    running = pids(sampler)
    sampler.shutdown_worker()
    sampler.shutdown_worker()
    assert not any(is_running(pid) for pid in running)
    with pytest.raises(RuntimeError, match="has been shut down"):
        sampler.obtain_samples(0, 1, None)


def test_a_forgotten_sampler_ends_its_workers():
    sampler = MultiprocessingSampler(Scripted(), Grid(), n_workers=1, max_episode_length=9)
    (pid,) = pids(sampler)
    del sampler
    assert not is_running(pid)


def test_a_pickled_sampler_comes_back_with_workers_of_its_own(make_sampler):
    sampler = make_sampler(Scripted(), Grid(), seed=3, n_workers=1)
    first = sampler.obtain_exact_episodes(1, None)
    copy = pickle.loads(pickle.dumps(sampler))
    try:
        assert set(pids(copy)).isdisjoint(pids(sampler))
        assert copy.total_env_steps == 0
        assert copy.obtain_exact_episodes(1, None).actions.tolist() == first.actions.tolist()
    finally:
        copy.shutdown_worker()


def test_a_factory_makes_workers_of_the_users_own_class():
    class ShortWorker(DefaultWorker):
        def __init__(self, steps=2, **kwargs):
            super().__init__(**kwargs)
            self._max_episode_length = steps

    factory = WorkerFactory(
        max_episode_length=50, n_workers=1, worker_class=ShortWorker, worker_args={"steps": 4}
    )
    sampler = MultiprocessingSampler.from_worker_factory(factory, Scripted(), Grid())
    try:
        assert sampler.obtain_exact_episodes(2, None).lengths.tolist() == [4, 4]
    finally:
        sampler.shutdown_worker()


# -- bad input -----------------------------------------------------------------------------------


def test_a_sampler_needs_a_factory_or_a_length():
    with pytest.raises(TypeError, match="Must construct a sampler from"):
        MultiprocessingSampler(Scripted(), Grid())


def test_a_factory_keeps_seed_and_length_and_knows_its_workers():
    factory = WorkerFactory(max_episode_length=30, seed=7, n_workers=2)
    worker = factory(1)
    assert (worker._seed, worker._max_episode_length) == (8, 30)
    with pytest.raises(ValueError, match="worker_number=2"):
        factory(2)


@pytest.mark.parametrize("name", ["max_episode_length", "n_workers"])
def test_numbers_must_be_positive(name):
    for value in (0, 2.5, "5"):
        with pytest.raises(ValueError, match=f"{name}={value!r} must be an integer"):
            WorkerFactory(**{"max_episode_length": 5, "n_workers": 1, name: value})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seeds_are_numpys(seed):
    with pytest.raises(ValueError, match=f"seed={seed} must be in 0"):
        WorkerFactory(max_episode_length=5, n_workers=1, seed=seed)


def test_lists_have_one_for_each_worker(make_sampler):
    words = "Length of list doesn't match number of workers: 3 for n_workers=2"
    with pytest.raises(ValueError, match=words):
        make_sampler([Scripted()] * 3, Grid())
    with pytest.raises(ValueError, match=words):
        make_sampler(Scripted(), [Grid()] * 3)
    sampler = make_sampler(Scripted(), Grid())
    with pytest.raises(ValueError, match=words):
        sampler.obtain_samples(0, 1, [None] * 3)
    with pytest.raises(ValueError, match=words):
        sampler.obtain_exact_episodes(1, None, [None] * 3)
    with pytest.raises(ValueError, match="num_samples=0"):
        sampler.obtain_samples(0, 0, None)
    with pytest.raises(ValueError, match="n_eps_per_worker=0"):
        sampler.obtain_exact_episodes(0, None)


@pytest.mark.parametrize("update", [3, "CartPole-v1", Grid])
def test_an_env_update_of_another_kind_is_refused(make_sampler, update):
    sampler = make_sampler(Scripted(), Grid(), n_workers=1)
    with pytest.raises(TypeError, match="must be an EnvUpdate, an env, None"):
        sampler.obtain_samples(0, 1, None, update)


def test_what_is_no_env_and_what_cannot_be_sent_is_refused(make_sampler):
    with pytest.raises(TypeError, match="must be a gymnasium env"):
        make_sampler(Scripted(), 3)
    with pytest.raises(TypeError, match=r"agents has 3; it must have get_action"):
        make_sampler(3, Grid())
    unsendable = (i for i in range(3))
    with pytest.raises(ValueError, match="cannot be sent to a worker process"):
        make_sampler(lambda observation: next(unsendable), Grid())


def test_infos_that_are_no_numbers_are_left_out_with_one_warning(make_sampler):
    sampler = make_sampler(Scripted(), Grid(), n_workers=1)
    with pytest.warns(UserWarning, match="env_infos.name is no number") as caught:
        batch = sampler.obtain_exact_episodes(3, None)
    assert "name" not in batch.env_infos
    assert sum("env_infos.name" in str(entry.message) for entry in caught) == 1
