"""Imports point downwards, and the learner and the collector know nothing of each other.

Read from the source, so that an import inside a function counts as well; imports for type checkers
alone do not.
"""

import ast
from pathlib import Path

import pytest

import sf_torchrl

PACKAGE = Path(sf_torchrl.__file__).parent

LAYERS = [  # a module may import only from lines above its own
    {"config"},
    {
        "algorithms.vtrace",
        "algorithms.lag",
        "algorithms.distributions",
        "algorithms.normalizer",
        "algorithms.stretches",
    },
    {"algorithms.advantages"},
    {"memory.arena", "memory.pipes"},
    {"memory.slab"},
    {"memory.episodes"},
    {"envs.spaces"},
    {"envs.vector", "envs.frames", "envs.tmaze"},
    {"envs.doom", "envs.atari"},
    {"envs.torchrl_env"},
    {"envs.factory"},
    {"envs.try_out"},
    {"memory.weights", "models.layers", "models.pieces"},
    {"models.pictures", "models.cores"},
    {"models.encoders"},
    {"models.torso"},
    {"models.network"},
    {"models.actor_critic", "models.row_policy", "models.random_actions"},
    {"models.given_policy"},
    {"models.policy_io"},
    {"algorithms.loss"},
    {"memory.batch"},
    {"workers.protocol", "workers.staging"},
    {"workers.split", "workers.torchrl_stepper", "env_updates"},
    {"workers.episodes"},
    {"workers.raw_split", "workers.vector_split", "workers.torchrl_split"},
    {
        "workers.supervisor",
        "workers.env_worker",
        "workers.inference_worker",
        "workers.episode_worker",
    },
    {"workers.engines"},
    {
        "collection.arguments",
        "collection.postprocess",
        "collection.publishing",
        "collection.replay",
    },
    {"collection.running"},
    {"collector", "sampler"},
    {"module", "evaluation"},
    {"data", "video"},
    {"commands"},
    {"callbacks.meter"},
    {"callbacks.reports", "callbacks.progress", "callbacks.checkpoints"},
    {"cli"},
    {"__main__", "__init__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SHARED = ("config", "algorithms.", "memory.", "models.", "envs.")
"""What the learner and the collector may both stand on."""


def name_of(path):
    """``collector`` or ``memory.slab``; a subpackage's own file is ``memory.__init__``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}
SUBPACKAGES = {name for name in MODULES if name.endswith(".__init__")}


def statements(tree):
    """All nodes that run, which excludes what stands under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for alternative in node.orelse:
                yield alternative
                yield from statements(alternative)
        else:
            yield node
            yield from statements(node)


def imported(source, modules=MODULES):
    """Modules of the package that the source imports; the package itself is ``__init__``."""
    found = set()
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"a relative import in line {node.lineno}"
            # What is imported from a package may be a module of it.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            is_module = [name.removeprefix("sf_torchrl.") in modules for name in inside]
            names = [name if m else node.module for name, m in zip(inside, is_module, strict=True)]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "sf_torchrl":
                found.add(module or "__init__")
    return found


def below(name):
    """Everything that a module imports, directly or through others."""
    found, to_visit = set(), [name]
    while to_visit:
        new = imported(MODULES[to_visit.pop()].read_text()) - found
        found |= new
        to_visit += new
    return found


def test_every_module_has_a_place_and_every_place_a_module():
    assert LEVEL.keys() == MODULES.keys() - SUBPACKAGES


@pytest.mark.parametrize("name", sorted(MODULES.keys() - SUBPACKAGES))
def test_imports_point_downwards(name):
    upward = {m for m in imported(MODULES[name].read_text()) if LEVEL[m] >= LEVEL[name]}
    assert not upward, f"{name} must not import {sorted(upward)}"


@pytest.mark.parametrize("name", sorted(SUBPACKAGES))
def test_subpackages_import_nothing_by_themselves(name):
    assert imported(MODULES[name].read_text()) == set()


@pytest.mark.parametrize(("one", "other"), [("module", "collector"), ("collector", "module")])
def test_learner_and_collector_never_import_each_other(one, other):
    reached = below(one)
    assert other not in reached
    assert not reached & {"data", "cli", "__init__"}


def test_learner_and_collector_share_only_what_both_stand_on():
    shared = below("module") & below("collector")
    assert shared
    assert not [name for name in shared if not name.startswith(SHARED)]


def test_workers_know_neither_learner_nor_collector():
    for name in LEVEL:
        if name.startswith("workers."):
            assert not below(name) & {"module", "collector", "data", "cli", "algorithms.loss"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from sf_torchrl.memory.slab import Slab, Key", {"memory.slab"}),
        ("from sf_torchrl.workers import protocol", {"workers.protocol"}),
        ("from sf_torchrl import collector, WeightStore", {"collector", "__init__"}),
        ("import sf_torchrl.data as d, os", {"data"}),
        ("import sf_torchrl", {"__init__"}),
        ("def f():\n    if x:\n        from sf_torchrl.cli import run", {"cli"}),
        ("if TYPE_CHECKING:\n    from sf_torchrl.cli import run\nelse:\n    import os", set()),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    from sf_torchrl.cli import run", {"cli"}),
        ("from sf_torchrl_contrib.cli import run\nfrom os import path", set()),
    ],
)
def test_what_counts_as_an_import(source, names):
    assert imported(source) == names


def test_relative_imports_are_refused():
    with pytest.raises(AssertionError, match="relative import"):
        imported("from .slab import Slab")
