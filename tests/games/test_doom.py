"""Real VizDoom."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sf_torchrl.envs.doom import DoomEnv
from sf_torchrl.envs.factory import make_env, with_arguments
from sf_torchrl.envs.spaces import EnvError
from sf_torchrl.envs.try_out import try_out

SCENARIOS = ["basic", "defend_the_center", "health_gathering", "my_way_home"]


@pytest.fixture
def doom():
    """Makes envs that are closed at the end."""
    made = []

    def make(*arguments, **settings):
        made.append(DoomEnv(*arguments, **settings))
        return made[-1]

    yield make
    for env in made:
        env.close()


def played(env, actions, seed=0):
    """Everything that an env says, from its reset on; it is not reset again."""
    seen = [env.reset(seed=seed)[0]]
    steps = []
    for action in actions:
        observation, *step, _ = env.step(action)
        seen.append(observation)
        steps.append(tuple(step))
        if step[1] or step[2]:
            break
    return seen, steps


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_that_ship_with_vizdoom_run_by_name(scenario):
    specs = try_out(f"doom_{scenario}")
    assert specs.observation[0].shape == (72, 128, 3)
    assert specs.observation[0].dtype == "uint8"
    assert specs.action.n == {"my_way_home": 6}.get(scenario, 4)
    assert specs.frame_skip == 4


def test_size_stack_and_channel_order_are_settings(doom):
    env = doom(width=40, height=30, frame_stack=3, channel_order="first")
    assert env.observation_space.shape == (9, 30, 40)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)
    same = doom(width=40, height=30, frame_stack=3).reset(seed=0)[0]
    assert np.array_equal(observation, same.transpose(2, 0, 1))


def test_a_seed_and_actions_decide_everything_that_follows(doom):
    actions = [0, 1, 1, 3, 2, 3, 0, 1]
    one, other = (played(doom(), actions, seed=5) for _ in range(2))
    assert np.array_equal(one[0], other[0])
    assert one[1] == other[1]
    different, _ = played(doom(), actions, seed=6)
    assert not np.array_equal(one[0][0], different[0])


def test_a_seed_holds_at_a_later_reset_too(doom):
    env = doom()
    first, _ = played(env, [1] * 5, seed=5)
    env.reset()
    again, _ = played(env, [1] * 5, seed=5)
    assert np.array_equal(first, again)


@pytest.mark.parametrize(("frame_skip", "steps"), [(4, 75), (10, 30)])
def test_the_scenarios_time_limit_truncates(doom, frame_skip, steps):
    """After 300 tics, each of which costs a point."""
    env = doom(frame_skip=frame_skip)
    seen, told = played(env, [0] * 100)
    assert len(told) == steps
    rewards, terminated, truncated = zip(*told, strict=True)
    assert rewards == (-float(frame_skip),) * steps
    assert not any(terminated)
    assert truncated == (False,) * (steps - 1) + (True,)
    assert len(seen) == steps + 1


def test_what_follows_a_truncation_is_seen_as_it_is(doom):
    """Not the picture before it: the game goes on behind the limit."""
    env = doom("my_way_home")
    seen, told = played(env, [1] * 600)
    assert told[-1][1:] == (False, True)
    assert not np.array_equal(seen[-1], seen[-2])


def test_a_goal_or_death_terminates(doom):
    for seed in range(3):
        _, told = played(doom("health_gathering"), [0] * 600, seed=seed)
        assert told[-1][1:] == (True, False)
        assert told[-1][0] < 0


def test_game_variables_come_beside_the_picture(doom):
    env = doom(game_variables=["AMMO2", "HEALTH"])
    seen, _ = played(env, [3] * 8)
    assert set(seen[0]) == {"screen", "gamevariables"}
    assert env.observation_space.contains(seen[0])
    assert seen[0]["gamevariables"].tolist() == [50.0, 100.0]
    assert seen[-1]["gamevariables"][0] < 50.0
    assert seen[0]["gamevariables"][0] == 50.0  # not overwritten


def test_the_network_has_an_encoder_for_picture_and_variables():
    from sf_torchrl import ActorCritic

    env = with_arguments("doom_basic", {"game_variables": ["HEALTH"]})
    encoder = ActorCritic.for_env(env).network.torso.encoder
    assert [type(part).__name__ for part in encoder.parts] == ["PictureEncoder", "VectorEncoder"]


def test_buttons_may_be_pressed_together(doom):
    assert doom(max_buttons_pressed=2).action_space.n == 1 + 3 + 3
    assert doom(max_buttons_pressed=3).action_space.n == 8


def test_nothing_is_left_in_the_working_directory_and_nothing_said(
    doom, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    env = doom()
    played(env, [1, 2])
    own = Path(env._directory.name)
    env.close()
    time.sleep(0.1)
    assert os.listdir(tmp_path) == []
    assert not own.exists()
    assert capfd.readouterr() == ("", "")


def test_a_closed_env_can_be_reset_again(doom):
    env = doom()
    first, _ = played(env, [1, 2], seed=3)
    env.close()
    again, _ = played(env, [1, 2], seed=3)
    assert np.array_equal(first, again)


def test_an_env_that_was_never_reset_closes(doom):
    doom().close()


def test_pictures_to_render_are_vizdooms_own(doom):
    env = doom(render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (120, 160, 3)
    assert env.metadata["render_fps"] == 35 / 4
    assert doom().render() is None


def test_a_scenario_of_ones_own_is_named_by_its_file(doom, tmp_path, monkeypatch):
    import vizdoom

    shipped = Path(vizdoom.scenarios_path)
    shutil.copy(shipped / "basic.wad", tmp_path)
    file = tmp_path / "mine.cfg"
    text = (shipped / "basic.cfg").read_text()
    file.write_text(text.replace("episode_timeout = 300", "episode_timeout = 40"))
    monkeypatch.chdir(tmp_path)
    for name in (str(file), "mine.cfg"):
        _, told = played(doom(name), [0] * 100)
        assert len(told) == 10


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("doom_basic", {"game_variables": "HEALTH"}, "must be a list of names"),
        ("doom_basik", {}, "no VizDoom scenario 'basik'; did you mean 'basic'"),
        ("doom_/nowhere/x.cfg", {}, "no VizDoom scenario '/nowhere/x.cfg'"),
        ("doom_basic", {"game_variables": ["HELTH"]}, "'HELTH'; did you mean 'HEALTH'"),
        ("doom_basic", {"frame_skip": 0}, "frame_skip=0"),
        ("doom_basic", {"height": 0}, "height=0"),
        ("doom_basic", {"channel_order": "chw"}, "channel_order='chw' must be first or last"),
    ],
)
def test_what_vizdoom_has_not_is_refused(name, settings, message):
    with pytest.raises(EnvError, match=message):
        make_env(with_arguments(name, settings))


@pytest.mark.multiprocess
def test_games_may_start_at_the_same_time_in_many_processes():
    """In one folder they race for the same files, and some crash."""
    program = (
        "from sf_torchrl.envs.doom import DoomEnv\n"
        "envs = [DoomEnv() for _ in range(12)]\n"
        "for seed, env in enumerate(envs):\n    env.reset(seed=seed)\n"
        "for env in envs:\n    env.close()\n"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(3)]
    assert [process.wait(100) for process in processes] == [0, 0, 0]


@pytest.mark.parametrize("frame_skip", [1, 4, 7])
@pytest.mark.parametrize("scenario", ["basic", "my_way_home"])
def test_episodes_are_as_long_as_vizdooms_own_limit_makes_them(doom, scenario, frame_skip):
    """Against VizDoom told of its limit."""
    env = doom(scenario, frame_skip=frame_skip)
    limited = doom(scenario, frame_skip=frame_skip)
    limited._game.set_episode_timeout(limited._time_limit - limited._game.get_episode_start_time())
    _, told = played(env, [0] * 3000)
    _, expected = played(limited, [0] * 3000)
    assert len(told) == len(expected)
    assert told[-1][1:] == (False, True)
    assert expected[-1][1:] == (True, False)
