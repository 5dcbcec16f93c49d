"""CartPole is learned by the command that the README shows."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from family import Family

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

ROOT = Path(__file__).parents[2]
SOLVED = 475


def sf_torchrl(*arguments, cwd):
    family = Family()
    done = subprocess.run(
        [Path(sys.executable).with_name("sf-torchrl"), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **family.environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert family.left_after(10) == {}
    return done


def test_cartpole_is_solved_by_its_config(tmp_path):
    """A mean return of 475 over the last 100 episodes while training, and when evaluated."""
    sf_torchrl(
        *("fit", "--config", ROOT / "configs" / "cartpole.yaml"),
        *("--data.env_steps", 700_000, "--reports.every_s", 0.5),
        *("--trainer.default_root_dir", tmp_path),
        cwd=tmp_path,
    )
    (file,) = tmp_path.glob("csv/*/metrics.csv")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    mean_returns = [float(row["collect/mean_return"] or "nan") for row in rows]
    assert max(mean_returns) >= SOLVED, mean_returns
    assert mean_returns[0] < SOLVED  # it was learned
    lags = [float(row["lag/max"]) for row in rows]
    assert max(lags) <= 50  # the config's max_policy_lag: no experience was thrown away

    evaluated = sf_torchrl(
        *("evaluate", "--checkpoint", "checkpoints/best.ckpt", "--episodes", 100, "--json"),
        cwd=tmp_path,
    )
    assert evaluated.stderr == ""
    assert json.loads(evaluated.stdout.splitlines()[-1])["mean_return"] >= SOLVED
