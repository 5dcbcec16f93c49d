"""The T-maze is solved with memory, and not without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family import Family

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

CONFIG = Path(__file__).parents[2] / "configs" / "memory_tmaze.yaml"


def success(tmp_path, core):
    """Share of episodes that end at the right side, after training by the config."""
    family = Family()
    command = [Path(sys.executable).with_name("sf-torchrl")]
    for arguments in (
        [
            "fit",
            *("--config", CONFIG, "--model.network.core", core),
            *("--data.env_steps", 1_000_000, "--trainer.default_root_dir", tmp_path),
        ],
        # Sampled: without memory the mode may as well stand still in the corridor for ever.
        [
            "evaluate",
            *("--checkpoint", "checkpoints/last.ckpt", "--episodes", 200),
            *("--deterministic", "false", "--json"),
        ],
    ):
        done = subprocess.run(
            [*command, *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, **family.environment},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert family.left_after(10) == {}
    return json.loads(done.stdout.splitlines()[-1])["mean_return"]


def test_a_gru_remembers_the_sign(tmp_path):
    assert success(tmp_path, "gru") > 0.95


def test_without_memory_half_of_the_episodes_succeed(tmp_path):
    assert 0.35 < success(tmp_path, "none") < 0.65
