"""The weight store: one whole version, never newer in name than in fact, whoever is killed."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from sf_torchrl.memory.weights import WeightStore


class Mixed(nn.Module):
    """Parameters and buffers of many kinds: nested, scalar, empty, frozen, shared."""

    def __init__(self, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.layer = nn.Linear(3, 5)
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, generator=g)
        self.exact = nn.Parameter(torch.randn(4, generator=g, dtype=torch.float64))
        self.short = nn.Parameter(torch.randn(7, generator=g).half())
        self.frozen = nn.Parameter(torch.randn(2, 3, generator=g), requires_grad=False)
        self.twin = nn.Linear(3, 5, bias=False)
        self.twin.weight = self.layer.weight
        self.register_buffer("count", torch.randint(2**62, (), generator=g))
        self.register_buffer("flags", torch.rand(9, generator=g) < 0.5)
        self.register_buffer("nothing", torch.zeros(0, 3))


def weights_of(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


# -- names, dtypes, versions ---------------------------------------------------------------------


def test_every_parameter_and_buffer_has_a_place_shared_ones_once():
    specs = {spec.name: (spec.dtype, spec.shape) for spec in WeightStore(Mixed()).specs}
    assert specs == {
        "layer.weight": (torch.float32, (5, 3)),
        "layer.bias": (torch.float32, (5,)),
        "exact": (torch.float64, (4,)),
        "short": (torch.float16, (7,)),
        "frozen": (torch.float32, (2, 3)),
        "count": (torch.int64, ()),
        "flags": (torch.bool, (9,)),
        "nothing": (torch.float32, (0, 3)),
    }


def test_the_module_a_store_is_made_from_is_version_zero():
    source, target = Mixed(1), Mixed(2)
    store = WeightStore(source)
    assert store.version == 0
    assert store.pull(target) == 0
    assert_same(weights_of(target), weights_of(source))


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda module: module, id="module"),
        pytest.param(lambda module: module.state_dict(), id="state dict"),
        pytest.param(TensorDict.from_module, id="TensorDict of a module"),
        pytest.param(
            lambda module: TensorDict(dict(module.state_dict()), []).unflatten_keys("."),
            id="TensorDict",
        ),
    ],
)
def test_published_bits_are_pulled_whatever_form_they_come_in(form):
    source, target = Mixed(1), Mixed(2)
    store = WeightStore(Mixed(3))
    store.publish(form(source))
    store.pull(target)
    assert_same(weights_of(target), weights_of(source))


def test_weights_published_are_copied():
    source, target = Mixed(1), Mixed(2)
    want = weights_of(source)
    store = WeightStore(source)
    with torch.no_grad():
        source.layer.weight.fill_(9.0)
    store.pull(target)
    assert_same(weights_of(target), want)


def test_pulled_weights_are_copied_in_place_and_keep_their_gradient():
    module = Mixed(1)
    store = WeightStore(Mixed(2))
    weight = module.layer.weight
    weight.grad = torch.ones_like(weight)
    store.pull(module)
    store.publish(Mixed(3))
    assert module.layer.weight is weight
    assert weight.requires_grad
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert torch.equal(weight, store_contents(Mixed(2)).layer.weight)


def store_contents(module):
    """A module that has been through a store of its own."""
    target = Mixed(99)
    WeightStore(module).pull(target)
    return target


def test_two_modules_pull_from_one_store_in_turn():
    first, second = Mixed(1), Mixed(2)
    store = WeightStore(first)
    for seed in (5, 6):
        source = Mixed(seed)
        store.publish(source)
        for module in (first, second):
            store.pull(module)
            assert_same(weights_of(module), weights_of(source))


def test_versions_count_up_by_one():
    store = WeightStore(Mixed())
    assert [store.publish(Mixed()) for _ in range(3)] == [1, 2, 3]
    assert store.version == 3
    assert store.pull(Mixed()) == 3


def test_a_version_may_be_given_and_is_counted_on_from():
    store = WeightStore(Mixed())
    assert store.publish(Mixed(), version=2**53 + 1) == 2**53 + 1
    assert store.pull(Mixed()) == 2**53 + 1
    assert store.publish(Mixed()) == 2**53 + 2
    assert store.publish(Mixed(), version=7) == 7
    assert store.version == 7


def test_names_that_the_store_lacks_are_ignored():
    source, target = Mixed(1), Mixed(2)
    store = WeightStore(Mixed(3))
    store.publish({**source.state_dict(), "optimizer": torch.zeros(3)})
    store.pull(target)
    assert_same(weights_of(target), weights_of(source))


def test_a_missing_name_is_refused_and_named():
    weights = Mixed().state_dict()
    del weights["exact"]
    with pytest.raises(ValueError, match=r"lack.*exact"):
        WeightStore(Mixed()).publish(weights)


def test_another_shape_is_refused_with_both_shapes():
    weights = {**Mixed().state_dict(), "exact": torch.zeros(3, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"'exact' have shape \(3,\), expected \(4,\)"):
        WeightStore(Mixed()).publish(weights)


def test_a_module_with_other_weights_cannot_pull():
    with pytest.raises(ValueError, match="lack"):
        WeightStore(Mixed()).pull(nn.Linear(3, 5))


def test_a_refused_publication_leaves_the_store_as_it_was():
    source, target = Mixed(1), Mixed(2)
    store = WeightStore(source)
    with pytest.raises(ValueError, match="lack"):
        store.publish({})
    assert store.pull(target) == store.version == 0
    assert_same(weights_of(target), weights_of(source))


def test_a_module_without_weights_has_versions_too():
    store = WeightStore(nn.Identity())
    assert store.publish(nn.Identity()) == 1
    assert store.pull(nn.Identity()) == 1


def test_a_store_attached_by_its_descriptor_is_the_same_store():
    source, target = Mixed(1), Mixed(2)
    ours = WeightStore(Mixed(3))
    theirs = WeightStore.attach(ours.specs, os.dup(ours.fd))
    assert theirs.publish(source) == 1
    assert ours.pull(target) == ours.version == 1
    assert_same(weights_of(target), weights_of(source))


def test_a_store_has_no_name_and_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    store = WeightStore(Mixed())
    assert os.fstat(store.fd).st_nlink == 0
    store.close()
    store.close()
    del store
    assert set(os.listdir("/proc/self/fd")) == before


# -- a publication in the middle of a pull, and a death in the middle of a publication -----------


class Interrupted:
    """Calls a function after the first tensor of a copy, the next few times one is made."""

    def __init__(self, monkeypatch, times, function):
        self._copy = torch._foreach_copy_
        self._times, self._function = times, function
        monkeypatch.setattr(torch, "_foreach_copy_", self)

    def __call__(self, targets, sources):
        self._copy(targets[:1], sources[:1])
        if self._times:
            self._times -= 1
            times, self._times = self._times, 0  # what the function copies is not interrupted
            self._function()
            self._times = times
        self._copy(targets[1:], sources[1:])


def constant(k):
    """Weights of Mixed that are all ``k``."""
    return {name: torch.full_like(t, k) for name, t in Mixed().state_dict().items()}


def versions_in(module):
    """The distinct numbers among its weights."""
    return {
        float(x) for name, t in module.state_dict().items() if name != "flags" for x in t.view(-1)
    }


@pytest.mark.parametrize(("publications", "version"), [(1, 1), (2, 3), (3, 4)])
def test_a_pull_overtaken_by_publications_is_whole(monkeypatch, publications, version):
    store, target = WeightStore(Mixed()), Mixed(2)
    store.publish(constant(1))
    later = iter(range(2, 100))

    def publish():
        for _ in range(publications):
            k = next(later)
            store.publish(constant(k), version=k)

    Interrupted(monkeypatch, 1, publish)
    assert store.pull(target) == version  # one: its copy was not touched; more: copied again
    assert versions_in(target) == {float(version)}


def test_a_pull_that_is_overtaken_each_time_gives_up(monkeypatch):
    store, target = WeightStore(Mixed()), Mixed(2)

    def publish():
        store.publish(constant(1))
        store.publish(constant(2))

    Interrupted(monkeypatch, 10**9, publish)
    with pytest.raises(RuntimeError, match="weights changed during each"):
        store.pull(target)


def test_a_publication_that_ends_in_the_middle_is_never_seen_and_the_next_is(monkeypatch):
    store, target = WeightStore(Mixed()), Mixed(2)
    store.publish(constant(1))

    def die():
        raise KeyboardInterrupt

    Interrupted(monkeypatch, 1, die)
    with pytest.raises(KeyboardInterrupt):
        store.publish(constant(2))
    assert store.pull(target) == store.version == 1
    assert versions_in(target) == {1.0}
    assert store.publish(constant(3)) == store.pull(target) == 2
    assert versions_in(target) == {3.0}


# -- two processes -------------------------------------------------------------------------------

SIZES = (1, 1500, 50, 2000)


class Equal(nn.Module):
    """Every weight is the same number; one flat array shows them all."""

    def __init__(self, scale=1):
        super().__init__()
        sizes = [size * scale for size in SIZES]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64)
        parts = self.flat.split(sizes)
        self.parts = nn.ParameterList(nn.Parameter(part) for part in parts)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def become(self, k):
        self.flat.fill_(k)
        self.count.fill_(k)

    def value(self):
        """The number, or None where two weights differ."""
        count = int(self.count)
        return count if (self.flat.numpy() == count).all() else None


PUBLISH = """
import pickle, sys
specs, fd = pickle.load(sys.stdin.buffer)
import torch
torch.set_num_threads(1)
from test_weights import Equal
from sf_torchrl.memory.weights import WeightStore
store, module = WeightStore.attach(specs, fd), Equal()
k = store.version
while True:
    k += 1
    module.become(k)
    store.publish(module, version=k)
"""


@pytest.mark.multiprocess
def test_a_hundred_thousand_pulls_from_a_store_written_at_full_rate():
    store, module = WeightStore(Equal()), Equal()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    publisher = subprocess.Popen(
        [sys.executable, "-c", PUBLISH],
        stdin=subprocess.PIPE,
        pass_fds=[store.fd],
        env=environment,
    )
    pickle.dump((store.specs, store.fd), publisher.stdin)
    publisher.stdin.close()
    while store.version == 0:  # it imports torch
        assert publisher.poll() is None
    newest = pulls = distinct = 0
    try:
        while pulls < 100_000 or distinct < 300:  # two processes on one core: few are seen
            label = store.pull(module)
            pulls += 1
            value = module.value()
            assert value is not None, "weights of two versions in one pull"
            assert label <= value, "a label newer than its weights"
            assert label == value, "a label that is not its weights'"
            assert label >= newest, "labels went backwards"
            assert store.version >= label
            distinct += label > newest
            newest = label
        assert publisher.poll() is None
    finally:
        publisher.kill()
        publisher.wait()


KILL = """
# The reader; it forks publishers from itself, since each import of torch would take a second.
import json, os, random, signal, time
import torch
torch.set_num_threads(1)
from test_weights import Equal
from sf_torchrl.memory.weights import WeightStore

scale = 100  # copying takes most of a publisher's time
store, module = WeightStore(Equal(scale)), Equal(scale)
random.seed(0)
interrupted = attempts = 0
wrong, newest = [], 0
while interrupted < 50 and attempts < 1000:
    attempts += 1
    reader, publisher = os.getpid(), os.fork()
    if publisher == 0:
        restarted, mine = WeightStore.attach(store.specs, store.fd), Equal(scale)
        k = restarted.version
        while os.getppid() == reader:
            k += 1
            mine.become(k)
            restarted.publish(mine, version=k)
    while store.version == newest:  # it has published
        time.sleep(0)
    time.sleep(random.random() * 1e-3)
    os.kill(publisher, signal.SIGKILL)
    os.waitpid(publisher, 0)
    begun, done = store._header[:2].tolist()
    interrupted += begun != done
    for _ in range(2):
        label, value = store.pull(module), module.value()
        if not (label == value == store.version and label > newest - 1):
            wrong.append((label, value, store.version, newest))
    newest = label
print(json.dumps({"interrupted": interrupted, "attempts": attempts, "wrong": wrong}))
"""


@pytest.mark.multiprocess
def test_publishers_killed_in_the_middle_leave_a_whole_version_and_their_successors_go_on():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", KILL], stdout=subprocess.PIPE, env=environment, check=True
    )
    found = json.loads(run.stdout)
    assert found["interrupted"] >= 50, "too few were killed between the copy's begin and end"
    assert found["wrong"] == []
