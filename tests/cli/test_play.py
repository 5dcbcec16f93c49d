"""The command line on pictures: ``play``, ``evaluate``, and what cannot be."""

import json
import sys

import av
import pytest
import torch

from sf_torchrl import cli

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings(
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
        r"ignore:\s*skip_none parameter was deprecated:DeprecationWarning",
    ),
]

SMALL = [
    "--data.collector.num_envs_per_worker=2",
    "--data.collector.num_workers=1",
    "--data.collector.frames_per_batch=64",
    "--data.env_steps=128",
]
ENVS = {
    "doom_basic": ["--data.env=doom_basic", '--data.env_kwargs={"width": 64, "height": 48}'],
    "doom with variables and memory": [
        "--data.env=doom_basic",
        '--data.env_kwargs={"game_variables": ["HEALTH"], "channel_order": "first"}',
        "--model.network.core=gru",
        "--model.network.rnn_size=16",
    ],
    "atari_pong": [
        "--data.env=atari_pong",
        "--model.network.encoder_conv_architecture=convnet_atari",
    ],
}


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch, tmp_path):
    """What ``cli.run`` leaves behind in this process is taken back."""
    monkeypatch.setattr(sys, "argv", ["sf-torchrl"])
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def trained(tmp_path, settings):
    root = tmp_path / "run"
    assert cli.run(["fit", *settings, *SMALL, f"--trainer.default_root_dir={root}"]) == 0
    return root / "checkpoints" / "last.ckpt"


def run_quietly(arguments, capsys):
    capsys.readouterr()
    code = cli.run(arguments)
    return code, capsys.readouterr()


@pytest.mark.parametrize("settings", ENVS.values(), ids=ENVS.keys())
def test_what_was_trained_on_pictures_is_evaluated_and_recorded(settings, tmp_path, capsys, family):
    checkpoint = trained(tmp_path, settings)
    pong = "atari" in settings[0]
    arguments = ["evaluate", f"--checkpoint={checkpoint}", "--episodes=2", "--json"]
    code, said = run_quietly(arguments, capsys)
    assert code == 0
    assert json.loads(said.out.splitlines()[-1])["episodes"] == 2
    video = tmp_path / "out.mp4"
    arguments = ["play", f"--checkpoint={checkpoint}", f"--video={video}", "--episodes=1"]
    code, said = run_quietly(arguments, capsys)
    assert (code, said.err) == (0, "")
    (line,) = said.out.splitlines()
    with av.open(str(video)) as container:
        (stream,) = container.streams.video
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert float(stream.average_rate) == (15 if pong else 8.75)
        assert stream.width / stream.height == pytest.approx(4 / 3, abs=0.01)
    assert f" {len(pictures)} pictures of {stream.width}x{stream.height}" in line
    assert stream.height >= 480
    assert any((pictures[0] != picture).any() for picture in pictures)
    assert pictures[0].std() > 10  # not a blank


def test_an_env_without_pictures_cannot_be_played(tmp_path, capsys, family):
    settings = ["--data.env=memory_tmaze", "--model.network.encoder_mlp_layers=[8]"]
    checkpoint = trained(tmp_path, settings)
    code, said = run_quietly(["play", f"--checkpoint={checkpoint}"], capsys)
    assert code == 2
    assert "memory_tmaze" in said.err
    assert len(said.err.splitlines()) == 1


def test_a_video_needs_a_folder_that_exists(tmp_path, capsys, family):
    settings = [*ENVS["doom_basic"]]
    checkpoint = trained(tmp_path, settings)
    arguments = ["play", f"--checkpoint={checkpoint}", f"--video={tmp_path}/no/out.mp4"]
    code, said = run_quietly(arguments, capsys)
    assert code == 2
    assert "there is no folder" in said.err


REFUSED = {
    "no such scenario": (["--data.env=doom_basik"], "did you mean 'basic'?"),
    "no such game": (["--data.env=atari_pogn"], "did you mean 'pong'?"),
    "no such setting": (
        ["--data.env=doom_basic", '--data.env_kwargs={"widht": 64}'],
        "unexpected keyword argument 'widht'",
    ),
    "too small": (
        ["--data.env=doom_basic", '--data.env_kwargs={"width": 16, "height": 16}'],
        "height 16 and width 16 is too small for convnet_simple",
    ),
    "height, width and channels alike": (
        ["--data.env=atari_pong", '--data.env_kwargs={"frame_stack": 84}'],
        "does not tell height, width and channels apart; set network.channel_order",
    ),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_is_one_line_before_workers_start(
    settings, message, tmp_path, capsys, family
):
    arguments = ["fit", *settings, *SMALL, f"--trainer.default_root_dir={tmp_path}"]
    code, said = run_quietly(arguments, capsys)
    assert code == 2
    (line,) = said.err.splitlines()
    assert message in line
    assert family.env_workers() == []


MISSING = {"vizdoom": "doom_basic", "ale_py": "atari_pong", "cv2": "doom_basic"}


@pytest.mark.parametrize(("module", "env"), MISSING.items())
def test_a_missing_extra_names_the_command_that_installs_it(module, env, capsys, monkeypatch):
    family_name = env.split("_")[0]
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"sf_torchrl.envs.{family_name}", raising=False)
    code, said = run_quietly(["fit", f"--data.env={env}"], capsys)
    assert code == 2
    (line,) = said.err.splitlines()
    assert f"pip install 'sf_torchrl[{family_name}]'" in line


def test_without_the_video_extra_play_says_what_to_install(tmp_path, capsys, family, monkeypatch):
    checkpoint = trained(tmp_path, ENVS["doom_basic"])
    monkeypatch.setitem(sys.modules, "av", None)
    arguments = ["play", f"--checkpoint={checkpoint}", f"--video={tmp_path}/out.mp4"]
    code, said = run_quietly(arguments, capsys)
    assert code == 2
    assert "pip install 'sf_torchrl[video]'" in said.err
