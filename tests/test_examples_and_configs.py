"""Every configuration and every example runs, for a few batches."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from family import Family

from sf_torchrl import cli

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings(
        # Lightning's progress over batches, with torch 2.13.
        r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
        # What replaces it came with jsonargparse 4.49; 4.40 will do otherwise.
        r"ignore:\s*skip_none parameter was deprecated:DeprecationWarning",
    ),
]

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("**/*.yaml"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FEWER_STEPS = {"torchrl_sac": 1000, "torchrl_trainer": 2000}  # they learn at every one


def name(path):
    return path.stem


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    """What ``cli.run`` leaves behind in this process is taken back."""
    monkeypatch.setattr(sys, "argv", ["sf-torchrl"])
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(variable, "0")


def test_there_are_configs_and_examples():
    assert CONFIGS
    assert EXAMPLES


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_a_config_holds_settings_that_exist(path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.run(["fit", "--config", str(path), "--print_config"])
    assert end.value.code == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(path.read_text())
    assert written["data"]["env"] == resolved["data"]["env"]
    for name, value in written["data"].get("collector", {}).items():
        assert resolved["data"]["collector"][name] == value


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_a_config_trains(path, family, tmp_path):
    collector = yaml.safe_load(path.read_text())["data"].get("collector", {})
    env_steps = 3 * collector.get("frames_per_batch", 1024)
    arguments = [
        *("fit", "--config", str(path)),
        f"--data.env_steps={env_steps}",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    assert cli.run(arguments) == 0
    saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["sf_torchrl"]
    assert (saved["env_steps"], saved["train_batches"]) == (env_steps, 3)
    assert saved["policy_version"] >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_an_example_runs_from_any_folder(path, tmp_path):
    family = Family()
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=tmp_path,
        env={
            **os.environ,
            **family.environment,
            "SF_TORCHRL_EXAMPLE_STEPS": str(FEWER_STEPS.get(path.stem, 3000)),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert family.left_after(10) == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_an_example_can_be_read_at_a_glance(path):
    assert len(path.read_text().splitlines()) < 80
