"""However a run ends, it says why, and within seconds nothing of it is left."""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from envs import CountingEnv, FaultyEnv
from policies import FailingPolicy

from sf_torchrl import SharedMemoryCollector
from sf_torchrl.workers.protocol import receive_setup, send_setup
from sf_torchrl.workers.supervisor import WorkerError

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(60)]


def faulty(fault, **options):
    """An env that fails everywhere but in this process, which tries it out."""
    return partial(FaultyEnv, fault, spared=os.getpid(), length=4, **options)


# -- failures of workers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "where", "message"),
    [
        # An error such as the worker's own pipes have is the env's like any other.
        ("raise_error_of_pipes", "step", "env worker 0 failed with BrokenAndEnded('the simulator"),
        ("system_exit", "reset", "env worker 0 failed with SystemExit(0)"),
        ("exit", "constructor", "env worker 0 ended with exit code 7"),
    ],
)
def test_a_worker_that_fails_ends_the_run_with_its_name_and_the_reason(
    make_collector, family, fault, where, message
):
    collector = make_collector(faulty(fault, where=where, at=12), num_workers=1)
    with pytest.raises(WorkerError) as caught:
        list(islice(collector, 10))
    text = str(caught.value)
    assert text.startswith(message)
    if "failed with" in message:
        assert "Traceback (most recent call last)" in text
        assert "tests/envs.py" in text
    assert family.left_after(5) == {}  # nobody has called shutdown


def test_a_worker_that_dies_is_noticed_while_another_still_delivers(
    make_collector, family, tmp_path
):
    env = faulty("sigkill", at=40, only_first=str(tmp_path / "one"))
    collector = make_collector(env, num_workers=2, num_envs_per_worker=1)
    with pytest.raises(WorkerError, match=r"env worker \d was killed by SIGKILL"):
        for _ in collector:  # without end
            pass
    assert family.left_after(5) == {}  # nobody has called shutdown


def test_a_policy_that_fails_ends_the_run_with_its_traceback(make_collector, family):
    collector = make_collector(CountingEnv, FailingPolicy(calls=12), num_workers=1)
    with pytest.raises(
        WorkerError, match=r"inference worker failed with .*the policy is lost"
    ) as e:
        list(islice(collector, 10))
    assert "tests/policies.py" in str(e.value)
    assert family.left_after(5) == {}


def test_a_worker_can_be_handed_more_descriptors_than_one_message_carries():
    parent, child = socket.socketpair()
    with parent, child:
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(150)]
        sending = threading.Thread(target=send_setup, args=(parent, pickle.dumps("config"), fds))
        sending.start()
        config, received = receive_setup(child)
        sending.join()
    assert config == "config"
    assert len(received) == 150
    assert not any(os.get_inheritable(fd) for fd in received)
    for fd in (*fds, *received):
        os.close(fd)


# -- shutting down -------------------------------------------------------------------------------


def test_shutting_down_twice_ends_everything_once(family):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    collector = SharedMemoryCollector(CountingEnv, num_workers=1, frames_per_batch=320)
    batches = iter(collector)
    next(batches)
    assert len(family.members()) == 2
    collector.shutdown()
    assert family.members() == {}
    collector.shutdown()
    assert list(batches) == []
    with pytest.raises(RuntimeError, match="has been shut down"):
        collector.start()
    del collector, batches
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_collector_that_was_never_started_can_be_shut_down(make_collector, family):
    collector = make_collector(CountingEnv, num_workers=1)
    assert family.members() == {}
    collector.shutdown()
    with pytest.raises(RuntimeError, match="has been shut down"):
        next(iter(collector))


def test_a_collector_can_be_shut_down_while_its_workers_start(make_collector, family):
    collector = make_collector(CountingEnv, num_workers=1)
    collector.start()
    assert len(family.members()) == 2
    collector.shutdown()
    assert family.members() == {}


def test_a_collector_that_is_forgotten_ends_its_processes(family):
    collector = SharedMemoryCollector(CountingEnv, num_workers=1, frames_per_batch=320)
    batches = iter(collector)
    next(batches)
    assert len(family.members()) == 2
    del collector, batches
    gc.collect()
    assert family.left_after(5) == {}


# -- the main process ends -----------------------------------------------------------------------


class Script:
    """A main process of its own, in a session of its own."""

    def __init__(self, family, arguments, **options):
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **family.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()

    def wait_for(self, line):
        """Read its output up to a line."""
        for printed in self.process.stdout:
            if printed.strip() == line:
                return
        pytest.fail(f"{line!r} was not printed:\n{self.process.stderr.read()}")

    def finish(self):
        """Its exit code and what else it printed, stdout and stderr."""
        out, err = self.process.communicate()
        return self.process.returncode, out, err


def unclaimed_segments():
    """Names in /dev/shm that no living process has mapped or open."""
    claimed = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            claimed |= {
                line.split("/dev/shm/")[1].split()[0]
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                if "/dev/shm/" in line
            }
            claimed |= {Path(os.readlink(fd)).name for fd in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:  # ended, or another user's
            continue
    return set(os.listdir("/dev/shm")) - claimed


def segments_of(pids):
    """Files in /dev/shm that the processes have mapped."""
    return [
        line
        for pid in pids
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    ]


ENDLESS = """
import signal
from envs import CountingEnv
from sf_torchrl import SharedMemoryCollector

signal.signal(signal.SIGINT, signal.default_int_handler)  # else ignored, where a job of a shell is

collector = SharedMemoryCollector(CountingEnv, num_workers=2, frames_per_batch=512)
try:
    for index, batch in enumerate(collector):
        if index == 3:
            print("collecting", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


TO_BE_KILLED = """
import subprocess, sys, threading
from functools import partial
from envs import CountingEnv, FaultyEnv
from sf_torchrl import SharedMemoryCollector

small = dict(num_envs_per_worker=1, num_splits=1, frames_per_batch=64)

class Simulator(CountingEnv):
    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "600"])
    def close(self):
        self.simulator.kill()
        self.simulator.wait()

# Workers started by a thread that has ended cannot ask the kernel to be killed with their parent.
other = SharedMemoryCollector(Simulator, num_workers=1, **small)
thread = threading.Thread(target=lambda: next(iter(other)))
thread.start()
thread.join()
next(iter(other))

# A worker that holds its GIL for ever runs no Python that could notice its parent's end.
hanging = partial(FaultyEnv, "hang_holding_gil", at=200, only_first=sys.argv[1])
for batch in SharedMemoryCollector(hanging, num_workers=2, **small):
    pass
"""


def test_a_main_process_that_is_killed_leaves_nothing_behind(family, tmp_path):
    """No process of its own, none that an env has started, and no shared memory."""
    before = unclaimed_segments()
    with Script(family, ["-c", TO_BE_KILLED, str(tmp_path / "one hangs")]) as script:
        script.wait_for("hanging")
        assert len(family.members()) == 1 + 2 + 3 + 1
        assert segments_of(family.members()) == []
        script.process.send_signal(signal.SIGKILL)
        script.process.wait()
        assert family.left_after(5) == {}
    assert unclaimed_segments() - before == set()


def test_ctrl_c_ends_the_run_without_a_word_from_the_workers(family):
    with Script(family, ["-c", ENDLESS]) as script:
        script.wait_for("collecting")
        os.killpg(script.process.pid, signal.SIGINT)  # as a terminal does
        assert script.finish() == (0, "interrupted\n", "")
        assert family.left_after(5) == {}


UNGUARDED = """
import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from sf_torchrl import SharedMemoryCollector

REWARD = 3.5


class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), REWARD, False, False, {}


class MyNetwork(torch.nn.Module):
    def forward(self, observation):
        return observation[:, 0].long()


policy = TensorDictModule(MyNetwork(), in_keys=["observation"], out_keys=["action"])
collector = SharedMemoryCollector(lambda: MyEnv(), policy, num_workers=1, frames_per_batch=512)
for batch in collector:
    break

print(batch["next", "reward"].unique().tolist(), batch["action"].unique().tolist(), flush=True)
"""
# Cells of a notebook: one compiled block after the other, in a __main__ that has no file.
NOTEBOOK = f"""
import code
cells = code.InteractiveConsole(globals())
for cell in {UNGUARDED!r}.split("\\n\\n\\n"):
    cells.runsource(cell, symbol="exec")
"""


def test_main_needs_no_guard_may_use_its_own_classes_and_need_not_shut_down(family, tmp_path):
    """In a notebook; of scripts see the examples."""
    with Script(family, ["-c", NOTEBOOK], cwd=tmp_path) as script:
        assert script.finish() == (0, "[3.5] [0, 1]\n", "")
        assert family.left_after(5) == {}
