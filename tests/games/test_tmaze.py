"""The T-maze, whose sign has to be remembered."""

import numpy as np
import pytest

from sf_torchrl.envs.spaces import EnvError
from sf_torchrl.envs.tmaze import FORWARD, LEFT, RIGHT, TMaze
from sf_torchrl.envs.try_out import try_out


def walked(turn, seed=0, length=4):
    env = TMaze(length)
    seen = [env.reset(seed=seed)[0]]
    for action in [FORWARD] * length + [turn]:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(observation)
    return np.stack(seen), reward, terminated, truncated


@pytest.mark.parametrize("seed", range(6))
def test_the_sign_is_seen_at_the_start_and_rewards_its_side(seed):
    seen, *_ = walked(LEFT, seed)
    left = seen[0].tolist() == [1, 0, 1, 0]
    assert left or seen[0].tolist() == [0, 1, 1, 0]
    assert walked(LEFT, seed)[1:] == (float(left), True, False)
    assert walked(RIGHT, seed)[1:] == (float(not left), True, False)


def test_behind_the_start_nothing_tells_the_signs_apart():
    both = {}
    for seed in range(20):
        seen, *_ = walked(LEFT, seed)
        both[tuple(seen[0])] = seen[1:]
    one, other = both.values()
    assert np.array_equal(one, other)
    assert one[-2].tolist() == [0, 0, 0, 1]


def test_both_signs_are_equally_likely():
    env = TMaze()
    left = [env.reset(seed=seed)[0][0] for seed in range(400)]
    assert 0.4 < np.mean(left) < 0.6


def test_turning_in_the_corridor_leads_nowhere_and_time_runs_out():
    env = TMaze(4)
    env.reset(seed=0)
    steps = [env.step(LEFT) for _ in range(12)]
    assert [truncated for *_, truncated, _ in steps] == [False] * 11 + [True]
    assert not any(terminated or reward for _, reward, terminated, *_ in steps)
    assert all(np.array_equal(steps[0][0], observation) for observation, *_ in steps)


def test_it_has_a_name_and_needs_a_corridor():
    assert try_out("memory_tmaze").observation[0].shape == (4,)
    with pytest.raises(EnvError, match="length=0"):
        TMaze(0)


def test_a_function_in_a_module_of_a_like_name_is_itself():
    assert try_out("games.doom_envs:make").observation[0].shape == (4,)
    assert try_out("doom_envs:make").observation[0].shape == (4,)
