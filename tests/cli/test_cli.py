"""The command line: real processes where a process is the point, ``cli.run`` elsewhere."""

import contextlib
import csv
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from family import Family

from sf_torchrl import cli

pytestmark = pytest.mark.filterwarnings(
    # Lightning's progress over batches, with torch 2.13.
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    # What replaces it came with jsonargparse 4.49; 4.40 will do otherwise.
    r"ignore:\s*skip_none parameter was deprecated:DeprecationWarning",
)

ROOT = Path(__file__).parents[2]
CARTPOLE = ROOT / "configs" / "cartpole.yaml"
SCRIPT = [str(Path(sys.executable).with_name("sf-torchrl"))]
MODULE = [sys.executable, "-m", "sf_torchrl"]

ENVS = '''
"""Envs that are right or wrong in one way each."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    broken_after = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == self.broken_after:
            raise RuntimeError("the simulator fell over")
        return np.zeros(2, np.float32), 1.0, self.t == 50, False, {}


class Pole(Walk):
    """Looks like CartPole, and lasts 50 steps."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)

    def reset(self, **kwargs):
        super().reset(**kwargs)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        return np.zeros(4, np.float32), *super().step(action)[1:]


def walk():
    return Walk()


class Falls(Walk):
    broken_after = 20


class Graph(Walk):
    observation_space = spaces.Graph(spaces.Box(-1, 1, (2,)), None)


class Many(Walk):
    action_space = spaces.MultiDiscrete([2, 3])


class Unlicensed(Walk):
    def __init__(self):
        raise OSError("no license for the simulator")


class OldReset(Walk):
    def reset(self):
        return np.zeros(2, np.float32)


class OldStep(Walk):
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, {}


class WrongShape(Walk):
    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}
'''


def command(*arguments, cwd, program=SCRIPT):
    """Run a real command to its end; no process of it may be left a little later."""
    family = Family()
    done = subprocess.run(
        [*program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **family.environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert family.left_after(10) == {}
    return done


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    """What ``cli.run`` leaves behind in this process is taken back."""
    monkeypatch.setattr(sys, "argv", ["sf-torchrl"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


@pytest.fixture
def run(capsys):
    """``cli.run`` in this process: exit code, stdout, stderr."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = cli.run([str(argument) for argument in arguments])
        except SystemExit as end:  # --help, --print_config
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(run):
    """Run what must be refused: exit code 2, and one line, which is returned."""

    def refused(*arguments):
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        (line,) = err.splitlines()
        assert line.startswith("sf-torchrl: error: ")
        return line

    return refused


def small(folder, *more, env="CartPole-v1"):
    """Options of a run of a second, without processes."""
    return [
        "fit",
        f"--data.env={env}",
        "--data.env_steps=512",
        "--data.collector.num_workers=0",
        "--data.collector.frames_per_batch=256",
        "--model.network.encoder_mlp_layers=[16]",
        f"--trainer.default_root_dir={folder}",
        *more,
    ]


@pytest.fixture
def envs(tmp_path, monkeypatch):
    """A folder of envs that ``module:function`` finds."""
    (tmp_path / "envs_in_a_folder.py").write_text(ENVS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "envs_in_a_folder:{}".format
    sys.modules.pop("envs_in_a_folder", None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a finished run of the real command, and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    done = command(
        *("fit", "--config", CARTPOLE, "--data.env_steps", 8192),
        *("--trainer.default_root_dir", "run", "--model.learner.learning_rate", 0.002),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run", done


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    """A checkpoint of a short run in this process."""
    folder = tmp_path_factory.mktemp("short")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["sf-torchrl"])
        for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
            patch.setenv(name, "0")
        assert cli.run(small(folder)) == 0
    return folder


COUNTERS = ("env_steps", "train_batches", "policy_version", "skipped_minibatches")


def saved(path):
    """The learner's counters in a checkpoint."""
    entry = torch.load(path, weights_only=True)["sf_torchrl"]
    return {name: entry[name] for name in COUNTERS}


def logged_steps(run_folder, version):
    file = run_folder / "csv" / f"version_{version}" / "metrics.csv"
    return [int(row["step"]) for row in csv.DictReader(file.read_text().splitlines())]


# Training


@pytest.mark.multiprocess
def test_fit_leaves_config_checkpoints_and_logs(trained):
    folder, done = trained
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["env"] == "CartPole-v1"
    assert config["data"]["env_steps"] == 8192
    assert config["model"]["learner"]["learning_rate"] == 0.002  # the command line's
    assert config["model"]["learner"]["ppo_epochs"] == 2  # the file's
    assert config["model"]["loss"]["gamma"] == 0.99  # the default
    for name in ("last", "best", "env_steps-000000008192"):
        assert saved(folder / "checkpoints" / f"{name}.ckpt")["env_steps"] <= 8192
    assert saved(folder / "checkpoints" / "last.ckpt") == {
        "env_steps": 8192,
        "train_batches": 4,
        "policy_version": 8,
        "skipped_minibatches": 0,
    }
    assert logged_steps(folder, 0)[-1] == 8192
    assert list(folder.glob("tensorboard/version_0/events.out.tfevents.*"))
    assert "8,192/8,192 env steps" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.multiprocess
def test_ckpt_path_last_continues_where_the_run_stopped(trained, tmp_path):
    folder, _ = trained
    shutil.copytree(folder, tmp_path / "run")
    done = command(
        *("fit", "--config", "run/config.yaml", "--ckpt_path", "last"),
        *("--data.env_steps", 16384),
        cwd=tmp_path,
        program=MODULE,
    )
    assert done.returncode == 0, done.stderr
    counters = saved(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert (counters["env_steps"], counters["train_batches"]) == (16384, 8)
    assert counters["policy_version"] == 16
    steps = logged_steps(tmp_path / "run", 1)
    assert steps[-1] == 16384
    assert steps[0] > 8192
    assert "16,384/16,384 env steps" in done.stderr


def test_a_finished_run_that_is_continued_ends_at_once(run, short_run, tmp_path):
    shutil.copytree(short_run, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / "last.ckpt"
    counters, weights = saved(path), torch.load(path, weights_only=True)["state_dict"]
    code, _, _ = run(*small(tmp_path, "--ckpt_path=last"))
    assert code == 0
    assert saved(path) == counters
    for name, value in torch.load(path, weights_only=True)["state_dict"].items():
        assert torch.equal(value, weights[name])


def test_a_checkpoint_that_is_not_there_is_no_fresh_start(refused, tmp_path):
    line = refused(*small(tmp_path, "--ckpt_path=last"))
    assert "there is no checkpoint" in line
    assert str(tmp_path / "checkpoints" / "last.ckpt") in line
    line = refused(*small(tmp_path, "--ckpt_path=elsewhere.ckpt"))
    assert "elsewhere.ckpt" in line
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.multiprocess
def test_an_env_found_beside_the_user_that_breaks_ends_the_run_with_its_traceback(tmp_path):
    (tmp_path / "envs_in_a_folder.py").write_text(ENVS)
    done = command(
        *("fit", "--data.env=envs_in_a_folder:Falls", "--data.env_steps=100000"),
        *("--data.collector.num_workers=1", "--model.network.encoder_mlp_layers=[16]"),
        cwd=tmp_path,
    )
    assert done.returncode == 3
    assert "env worker 0 failed with RuntimeError('the simulator fell over')" in done.stderr
    assert 'raise RuntimeError("the simulator fell over")' in done.stderr


def test_an_env_may_be_a_function_and_the_folder_has_a_default(run, envs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [o for o in small("") if not o.startswith(("--data.env=", "--trainer"))]
    code, _, err = run(*options, f"--data.env={envs('walk')}", "--data.env_steps=1024")
    assert code == 0
    assert saved(tmp_path / "runs/default/checkpoints/last.ckpt")["env_steps"] == 1024
    assert "return 50.00  length 50.0" in err


# Configuration


def test_later_files_win_and_the_command_line_wins_over_all(run, tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "data: {env: CartPole-v1, collector: {num_workers: 7, rollout_length: 16}}\n"
        "model: {learner: {learning_rate: 0.1, ppo_epochs: 4}}\n"
    )
    second.write_text("model: {learner: {learning_rate: 0.2}, loss: {gamma: 0.5}}\n")
    files = ["--config", first, "--config", second]
    code, out, _ = run("fit", *files, "--data.collector.num_workers=3", "--print_config")
    config = yaml.safe_load(out)
    assert code == 0
    assert config["data"]["env"] == "CartPole-v1"
    assert config["data"]["collector"]["num_workers"] == 3
    assert config["data"]["collector"]["rollout_length"] == 16
    assert config["model"]["learner"]["learning_rate"] == 0.2
    assert config["model"]["learner"]["ppo_epochs"] == 4
    assert config["model"]["loss"]["gamma"] == 0.5


def test_what_print_config_prints_is_a_config(run, tmp_path):
    _, out, _ = run(*small(tmp_path), "--print_config")
    file = tmp_path / "printed.yaml"
    file.write_text(out)
    assert run("fit", "--config", file, "--print_config")[:2] == (0, out)


def test_help_explains_every_setting(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("fit", "--help")
    text = " ".join(out.split())
    assert code == 0
    for name, explanation in {
        "model.learner.max_policy_lag": "in policy versions (optimizer steps), inclusive",
        "model.learner.num_minibatches": "Optimizer steps in one pass",
        "model.loss.gamma": "Discount per env step",
        "model.network.encoder_mlp_layers": "Units of each layer of the encoder",
        "data.env_steps": "env steps at which the run ends, those of resumed runs included",
        "data.collector.rollout_length": "Env steps in one rollout",
        "data.collector.env_start_timeout_s": "Seconds within which every env",
        "checkpoint.save_every_s": "seconds between checkpoints",
        "reports.every_s": "seconds between reports",
    }.items():
        assert f"--{name}" in text
        assert explanation in text
    code, out, _ = run("evaluate", "-h")
    text = " ".join(out.split())
    assert code == 0
    assert "--deterministic" in text
    assert "take the most probable action" in text


def test_without_a_command_the_commands_are_listed(run):
    code, out, err = run("--help")
    assert (code, err) == (0, "")
    assert {"fit", "evaluate"} <= set(out.split())
    code, out, _ = run()
    assert code == 2
    assert {"fit", "evaluate"} <= set(out.split())


# What cannot be


@pytest.mark.multiprocess
def test_a_misspelled_option_of_the_real_command_is_one_line(tmp_path):
    done = command(
        *("fit", "--config", CARTPOLE, "--model.learner.learnin_rate", 0.1), cwd=tmp_path
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert "learnin_rate" in line
    assert line.endswith("did you mean 'model.learner.learning_rate'?")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model.learning_rate=1", "model.learner.learning_rate"),
        ("model.loss.value_coeff=1", "model.loss.value_loss_coeff"),
        ("trainer.max_step=1", "trainer.max_steps"),
        ("checkpoint.save_every=1", "checkpoint.save_every_s"),
    ],
)
def test_a_misspelled_option_is_answered_with_the_closest_one(refused, tmp_path, wrong, right):
    line = refused(*small(tmp_path, f"--{wrong}"))
    assert line.endswith(f"did you mean '{right}'?")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("data: {collector: {num_worker: 1}}", "data.collector.num_workers"),
        ("modle: {learner: {learning_rate: 1}}", "model.learner.learning_rate"),
    ],
)
def test_a_misspelled_field_in_a_file_is_answered_with_the_closest_one(
    refused, tmp_path, text, right
):
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    line = refused("fit", "--config", file, "--data.env=CartPole-v1")
    assert line.endswith(f"did you mean '{right}'?")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("model.learner.learning_rate=fast", ["model.learner.learning_rate", "float", "fast"]),
        ("data.env_steps=1.5", ["data.env_steps", "int", "1.5"]),
        ("model.network.encoder_mlp_layers=[a]", ["encoder_mlp_layers", "int"]),
        ("data.collector.num_splits=3", ["num_splits=3 must divide num_envs_per_worker=8"]),
        ("data.collector.frames_per_batch=100", ["frames_per_batch=100", "rollout_length=32"]),
        ("model.loss.gamma=1.5", ["gamma=1.5 must be in [0, 1]"]),
        ("model.network.nonlinearity=gelu", ["nonlinearity='gelu'", "elu, relu, tanh"]),
        ("model.learner.num_minibatches=3", ["num_minibatches=3 must divide the 8 rollouts"]),
        ("data.env_steps=0", ["env_steps=0"]),
        ("checkpoint.keep_checkpoints=-1", ["keep_checkpoints=-1"]),
    ],
)
def test_a_wrong_value_is_quoted_with_what_it_should_be(refused, tmp_path, option, words):
    line = refused(*small(tmp_path, f"--{option}"))
    for word in words:
        assert word in line


def test_a_file_that_is_no_yaml_or_not_there_is_one_line(refused, tmp_path):
    file = tmp_path / "wrong.yaml"
    file.write_text("data: {env: [CartPole-v1\n")
    assert "line 2" in refused("fit", "--config", file)
    assert "nowhere.yaml" in refused("fit", "--config", "nowhere.yaml")


def test_without_an_env_the_setting_is_named(refused):
    assert "data.env" in refused("fit")


@pytest.mark.parametrize(("wrong", "right"), [("fot", "fit"), ("evalute", "evaluate")])
def test_a_misspelled_command_is_answered_with_the_closest_one(refused, wrong, right):
    assert refused(wrong).endswith(f"did you mean '{right}'?")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("CartPole-v9", ["CartPole-v9", "v1"]),
        ("CartPool-v1", ["CartPool-v1", "CartPole"]),
    ],
)
def test_an_unknown_env_id_is_one_line(refused, tmp_path, env, words):
    line = refused(*small(tmp_path, env=env))
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Graph", ["Graph", "supported: Box, or a Dict of Box", "gymnasium wrapper"]),
        ("Many", ["MultiDiscrete", "supported: Discrete, or Box", "gymnasium wrapper"]),
        ("OldStep", ["before 0.26", "step returned a tuple of 4", "shimmy"]),
        ("OldReset", ["before 0.26", "reset", "shimmy"]),
        ("WrongShape", ["step returned 'observation' of shape (3,)", "(2,)"]),
    ],
)
def test_an_env_that_does_not_fit_is_one_line(run, envs, tmp_path, name, words):
    code, _, err = run(*small(tmp_path, env=envs(name)))
    assert code == 2
    lines = [line for line in err.splitlines() if line.startswith("sf-torchrl: error: ")]
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


def test_the_traceback_of_an_env_that_cannot_be_made_is_its_own(run, envs, tmp_path):
    code, _, err = run(*small(tmp_path, env=envs("Unlicensed")))
    *traceback, line = err.splitlines()
    assert code == 2
    assert "no license for the simulator" in line
    assert line.startswith("sf-torchrl: error: making env ")
    assert 'raise OSError("no license for the simulator")' in "\n".join(traceback)
    assert "OSError: no license for the simulator" in traceback[-1]
    assert sum(text.startswith("Traceback") for text in traceback) == 1


# Evaluating


def test_evaluate_prints_json_on_its_last_line(run, short_run):
    path = short_run / "checkpoints" / "last.ckpt"
    code, out, err = run("evaluate", f"--checkpoint={path}", "--episodes", 20, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out.splitlines()[-1])
    assert result["episodes"] == 20
    assert result["min_return"] <= result["mean_return"] <= result["max_return"]
    assert result["mean_return"] == result["mean_length"]  # CartPole's reward is 1


def test_evaluate_prints_mean_deviation_and_extremes(run, short_run):
    path = short_run / "checkpoints" / "last.ckpt"
    code, out, err = run("evaluate", f"--checkpoint={path}", "--episodes=10")
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert first == "CartPole-v1, 10 episodes, deterministic"
    for line, name in zip(rest, ("return", "length"), strict=True):
        number = r"\d+\.\d\d"
        assert re.fullmatch(
            rf" *{name}: mean {number}  std {number}  min {number}  max {number}", line
        )


def weights_in(path, *ends):
    """The policy's weights whose names end so."""
    saved = torch.load(path, weights_only=True)["state_dict"]
    named = {k: v.double() for k, v in saved.items() if k.startswith("policy.")}
    return [next(v for k, v in named.items() if k.endswith(end)) for end in ends]


def played(path, episodes, seed, choose):
    """Returns of episodes of the policy in a checkpoint, played here with gymnasium alone."""
    mean, var = weights_in(path, "normalizer.parts.0.mean", "normalizer.parts.0.var")
    w1, b1 = weights_in(path, "layers.0.weight", "layers.0.bias")
    w2, b2 = weights_in(path, "actor_head.weight", "actor_head.bias")
    env = gymnasium.make("CartPole-v1")
    found = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=seed + episode)
        total, ended = 0.0, False
        while not ended:
            x = (torch.tensor(observation).double() - mean) / (var + 1e-5).sqrt()
            x = torch.nn.functional.elu(w1 @ x.clamp(-5, 5) + b1)
            observation, reward, terminated, truncated, _ = env.step(choose(w2 @ x + b2))
            total += reward
            ended = terminated or truncated
        found.append(total)
    return found


def evaluated(run, path, *options):
    _, out, _ = run("evaluate", f"--checkpoint={path}", "--json", *options)
    return json.loads(out.splitlines()[-1])


def test_deterministic_and_sampled_evaluation_are_those_of_the_saved_policy(run, short_run):
    """Against episodes played without this package; equal up to what chance allows."""
    path = short_run / "checkpoints" / "last.ckpt"
    rng = np.random.default_rng(0)

    def sample(logits):
        return int(rng.choice(2, p=logits.softmax(-1).numpy()))

    for deterministic, choose in (("true", lambda x: int(x.argmax())), ("false", sample)):
        got = evaluated(run, path, "--episodes=300", f"--deterministic={deterministic}")
        want = played(path, 200, 1000, choose)
        error = np.hypot(np.std(want) / 200**0.5, got["std_return"] / 300**0.5)
        assert abs(got["mean_return"] - np.mean(want)) < 4 * error


def test_sampling_is_another_policy_and_both_follow_the_seed(run, short_run):
    path = short_run / "checkpoints" / "last.ckpt"
    options = ("--episodes=30",)
    mode = evaluated(run, path, *options)
    sampled = evaluated(run, path, "--deterministic=false", *options)
    assert mode != sampled
    assert evaluated(run, path, *options) == mode
    assert evaluated(run, path, "--deterministic=false", *options) == sampled
    assert evaluated(run, path, "--seed=1", *options) != mode


def test_the_env_is_the_trained_one_unless_another_is_given(
    run, refused, envs, short_run, tmp_path
):
    moved = tmp_path / "moved.ckpt"
    shutil.copyfile(short_run / "checkpoints" / "last.ckpt", moved)
    assert "give --env" in refused("evaluate", f"--checkpoint={moved}")
    result = evaluated(run, moved, f"--env={envs('Pole')}", "--episodes=3")
    assert (result["min_return"], result["max_return"]) == (50, 50)


def test_a_checkpoint_that_does_not_fit_the_env_is_one_line(refused, short_run):
    path = short_run / "checkpoints" / "last.ckpt"
    line = refused("evaluate", f"--checkpoint={path}", "--env=Acrobot-v1")
    assert "does not fit env 'Acrobot-v1'" in line
    assert "size mismatch" in line


FOREIGN = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("epoch 3\n"),
    "no_checkpoint": lambda path: torch.save({"a": torch.ones(2)}, path),
    "half": lambda path: path.write_bytes(path.read_bytes()[:1000]),
}


@pytest.mark.parametrize("spoil", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_foreign_or_damaged_file_is_one_line(refused, short_run, tmp_path, spoil):
    path = tmp_path / "x.ckpt"
    shutil.copyfile(short_run / "checkpoints" / "last.ckpt", path)
    spoil(path)
    line = refused("evaluate", f"--checkpoint={path}", "--env=CartPole-v1")
    assert f"'{path}' is no checkpoint of sf-torchrl fit" in line


@pytest.mark.parametrize("command", ["evaluate", "fit"])
def test_code_in_a_checkpoint_is_not_run(run, short_run, tmp_path, command):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    path = tmp_path / "x.ckpt"
    good = torch.load(short_run / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save(good | {"trap": Trap()}, path)
    with contextlib.suppress(pickle.UnpicklingError):
        if command == "evaluate":
            code, _, _ = run("evaluate", f"--checkpoint={path}", "--env=CartPole-v1")
        else:
            code, _, _ = run(*small(tmp_path, f"--ckpt_path={path}", "--data.env_steps=1024"))
        assert code == 2
    assert not (tmp_path / "sprung").exists()


def test_a_missing_checkpoint_and_no_episodes_are_one_line(refused, short_run):
    assert "nowhere.ckpt" in refused("evaluate", "--checkpoint=nowhere.ckpt", "--env=CartPole-v1")
    path = short_run / "checkpoints" / "last.ckpt"
    assert "num_episodes=0" in refused("evaluate", f"--checkpoint={path}", "--episodes=0")
    assert "checkpoint" in refused("evaluate")
    assert refused("evaluate", f"--checkpont={path}").endswith("did you mean 'checkpoint'?")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("trainer.enable_checkpointing=false", ["enable_checkpointing"]),
        ("trainer.max_epochs=-5", ["max_epochs", "-5"]),
        ("trainer.gradient_clip_val=1", ["gradient clipping", "manual optimization"]),
    ],
)
def test_what_lightning_cannot_do_is_one_line(refused, tmp_path, option, words):
    line = refused(*small(tmp_path, f"--{option}"))
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    "change", ["--model.network.encoder_mlp_layers=[32]", "--data.env=Acrobot-v1"]
)
def test_resuming_with_another_network_is_one_line_and_changes_no_file(
    refused, short_run, tmp_path, change
):
    shutil.copytree(short_run, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / "last.ckpt"
    before = path.read_bytes()
    line = refused(*small(tmp_path, "--ckpt_path=last", "--data.env_steps=1024", change))
    assert "size mismatch" in line
    assert path.read_bytes() == before


def test_a_foreign_file_is_no_checkpoint_to_go_on_from_either(refused, tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(b"epoch 3\n")
    line = refused(*small(tmp_path, f"--ckpt_path={path}"))
    assert f"'{path}' is no checkpoint of sf-torchrl fit" in line


def test_a_checkpoint_without_weights_is_one_line(refused, tmp_path):
    path = tmp_path / "x.ckpt"
    torch.save({"sf_torchrl": {"network": {}}}, path)
    line = refused("evaluate", f"--checkpoint={path}", "--env=CartPole-v1")
    assert "state_dict" in line


def test_a_module_that_is_not_there_is_one_line(refused, tmp_path):
    assert "no module 'nowhere'" in refused(*small(tmp_path, env="nowhere:env"))
