"""Real Atari games."""

import itertools

import numpy as np
import pytest

from sf_torchrl.envs.atari import AtariEnv
from sf_torchrl.envs.factory import make_env
from sf_torchrl.envs.spaces import EnvError
from sf_torchrl.envs.try_out import try_out


def played(env, steps, seed=0):
    """Observations and what else was said, until an episode ends."""
    actions = np.random.default_rng(1).integers(env.action_space.n, size=steps)
    seen, told = [env.reset(seed=seed)[0]], []
    for action in actions:
        observation, *step, _ = env.step(int(action))
        seen.append(observation)
        told.append(tuple(step))
        if step[1] or step[2]:
            break
    return seen, told


@pytest.mark.parametrize(
    ("game", "num_actions"), [("pong", 6), ("breakout", 4), ("space_invaders", 6)]
)
def test_games_that_ship_with_ale_run_by_name(game, num_actions):
    specs = try_out(f"atari_{game}")
    assert specs.observation[0].shape == (4, 84, 84)
    assert specs.observation[0].dtype == "uint8"
    assert (specs.action.n, specs.frame_skip) == (num_actions, 4)


def test_a_game_whose_name_ends_in_a_letter_after_a_digit_is_found():
    assert try_out("atari_tic_tac_toe_3d").frame_skip == 4


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"size": 64, "frame_stack": 2}, (2, 64, 64)),
        ({"channel_order": "last"}, (84, 84, 4)),
        ({"grayscale": False, "frame_stack": 2}, (6, 84, 84)),
    ],
)
def test_size_stack_colour_and_channel_order_are_settings(settings, shape):
    env = AtariEnv("pong", **settings)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.shape == shape
    assert env.observation_space.contains(observation)
    env.close()


def test_a_seed_and_actions_decide_everything_that_follows():
    (one, told), (other, told_again) = (played(AtariEnv("breakout"), 60, seed=5) for _ in range(2))
    assert np.array_equal(one, other)
    assert told == told_again
    different, _ = played(AtariEnv("breakout"), 60, seed=7)
    assert len(one) != len(different) or not np.array_equal(one, different)


def test_the_stack_moves_by_one_picture_a_step():
    seen, _ = played(AtariEnv("pong"), 10)
    for before, after in itertools.pairwise(seen):
        assert np.array_equal(before[1:], after[:-1])


def test_frames_are_skipped():
    def frames(frame_skip):
        env = AtariEnv("pong", frame_skip=frame_skip, noop_max=0, fire_on_reset=False)
        env.reset(seed=0)
        before = env.unwrapped.ale.getEpisodeFrameNumber()
        env.step(0)
        return env.unwrapped.ale.getEpisodeFrameNumber() - before

    assert [frames(skip) for skip in (1, 4, 7)] == [1, 4, 7]


def test_rewards_are_the_games_own():
    """Breakout's upper bricks count more than one: nothing is clipped here."""
    _, told = played(AtariEnv("pong"), 1000)
    assert sum(reward for reward, *_ in told) < -5
    assert all(isinstance(reward, float) for reward, *_ in told)


@pytest.mark.parametrize("every_life", [False, True])
def test_an_episode_ends_with_the_last_life_or_with_each(every_life):
    env = AtariEnv("breakout", terminal_on_life_loss=every_life)
    _, told = played(env, 3000)
    assert told[-1][1:] == (True, False)
    assert (env.unwrapped.ale.lives() > 0) == every_life


def test_fire_starts_the_ball():
    """Without it nothing moves in Breakout."""
    still, waiting = AtariEnv("breakout", fire_on_reset=False, noop_max=0), []
    started, moving = AtariEnv("breakout", noop_max=0), []
    for env, seen in ((still, waiting), (started, moving)):
        seen.append(env.reset(seed=0)[0])
        seen += [env.step(0)[0] for _ in range(8)]
    assert all(np.array_equal(waiting[0], picture) for picture in waiting)
    assert not np.array_equal(moving[1], moving[-1])


def test_pictures_to_render_are_the_games_own_in_colour():
    env = AtariEnv("pong", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3)
    assert (env.metadata["render_fps"], env.metadata["aspect_ratio"]) == (15, 4 / 3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("atari_pogn", "no Atari game 'pogn' among the .* of ale-py; did you mean 'pong'"),
        ("atari_", "no Atari game ''"),
    ],
)
def test_a_game_that_is_not_there_is_refused(name, message):
    with pytest.raises(EnvError, match=message):
        make_env(name)
