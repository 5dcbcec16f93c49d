"""A module whose name begins as this package's envs do."""

from sf_torchrl.envs.tmaze import TMaze


def make():
    """An env."""
    return TMaze()
