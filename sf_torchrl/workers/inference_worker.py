"""The inference worker: a process that runs the policy on all waiting requests at once.

It takes every request in one read, pulls the weights if their version has moved, gathers the
observations, runs one forward pass, writes what the policy said into the slab, stamps each step
with the version that chose its action, and wakes each split that was served.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from sf_torchrl.memory.pipes import Message, PipeClosedError, PipeReader, PipeWriter
from sf_torchrl.memory.slab import (
    AT_START,
    CORE_STATE,
    ENV,
    MODE,
    NOW,
    OBSERVATION,
    POLICY,
    WAITED,
    Slab,
)
from sf_torchrl.memory.weights import WeightStore
from sf_torchrl.models.random_actions import random_actions
from sf_torchrl.models.row_policy import EXPLORATION, RowPolicy
from sf_torchrl.workers import protocol
from sf_torchrl.workers.protocol import InferenceWorkerConfig, PolicyServerConfig
from sf_torchrl.workers.staging import Array, rows_for


class PolicyServer:
    """Runs the policy for requests ``(worker, split, slot, step)``; process or no process.

    Args:
        policy: its parameters and buffers are overwritten by each pull.
        slab: where observations lie and outputs go.
        store: where newer weights come from.
        config: what the policy reads and writes.
    """

    def __init__(
        self, policy: RowPolicy, slab: Slab, store: WeightStore, config: PolicyServerConfig
    ) -> None:
        device = torch.device(config.device)
        self._policy = policy.to(device)
        self._rows, self._state_rows = rows_for(device), rows_for(device)
        self._store = store
        states = [slab.numpy(CORE_STATE, *key) for key in config.core_state_keys]
        self._inputs = [
            slab.numpy(OBSERVATION, *key)
            for key in config.in_keys
            if key not in config.core_state_keys
        ]
        self._core_states = states
        # Leaf, and which step's row is written: a recurrent state holds before the next step.
        self._outputs = [(slab.numpy(POLICY, *key), 0) for key in config.out_keys]
        self._outputs += [(slab.numpy(OBSERVATION, *key), 1) for key in config.state_keys]
        self._version_leaf = slab.numpy(ENV, "policy_version")
        self._mode = slab.numpy(MODE)
        self._current_mode = -1
        self._k = slab.layout.envs_per_slot
        self._specs = config.specs
        self._random_steps_left = config.random_steps
        self._action_leaves = [slab.numpy(POLICY, *feature.key) for feature in config.specs.actions]
        self._pull()

    def _pull(self) -> None:
        # Read first: a publication in between is then pulled at the next request.
        self._sequence = self._store.sequence
        self.version = self._store.pull(self._policy.weights)
        torch.clear_autocast_cache()

    @torch.no_grad()
    def serve(self, requests: Sequence[Message]) -> None:
        """Write action, everything else the policy says, and its version for every request.

        Hot path. Beyond the forward pass: 3 us to gather, and 4 us a request to write four outputs
        and the version.
        """
        if self._store.sequence != self._sequence:
            self._pull()
        if self._mode[0] != self._current_mode:
            self._current_mode = int(self._mode[0])
            self._policy.exploration = EXPLORATION[self._current_mode]
        where = [(slot, t) for _, _, slot, t in requests]
        gathered = self._rows.gather(self._inputs, where)
        if self._core_states:
            now = [(slot, NOW if t else AT_START) for slot, t in where]
            gathered += self._state_rows.gather(self._core_states, now)
        k = self._k
        # Calling the policy, not its forward, costs 5 us more.
        answers = self._rows.fetch(self._policy.forward(gathered, k * len(where)))
        if self._core_states:
            answers = self._keep_states(answers, where)
        for rows, (leaf, later) in zip(answers, self._outputs, strict=True):
            for j, (slot, t) in enumerate(where):
                leaf[slot, :, t + later] = rows[j * k : (j + 1) * k]
        for slot, t in where:
            self._version_leaf[slot, :, t] = self.version
        if self._random_steps_left > 0:
            self._act_randomly(where)

    def _keep_states(self, answers: list[Array], where: Sequence[tuple[int, int]]) -> list[Array]:
        """Store the core states, which come last; returns the other answers."""
        k, count = self._k, len(answers) - len(self._core_states)
        for rows, leaf in zip(answers[count:], self._core_states, strict=True):
            for j, (slot, _) in enumerate(where):
                leaf[slot, :, NOW] = rows[j * k : (j + 1) * k]
        return answers[:count]

    def _act_randomly(self, where: Sequence[tuple[int, int]]) -> None:
        """Replace the actions: TorchRL's ``init_random_frames``."""
        for leaf, drawn in zip(
            self._action_leaves, random_actions(self._specs, self._k * len(where)), strict=True
        ):
            rows = drawn.numpy()
            for j, (slot, t) in enumerate(where):
                leaf[slot, :, t] = rows[j * self._k : (j + 1) * self._k]
        self._random_steps_left -= self._k * len(where)


def serve_forever(
    server: PolicyServer,
    requests: PipeReader,
    workers: Sequence[PipeWriter],
    waited: np.ndarray[Any, Any],
) -> None:
    """Serve until told to stop.

    Raises:
        PipeClosedError: the other processes are gone.
    """
    now = time.perf_counter_ns
    while True:
        began = now()
        waiting: Iterable[Message] = requests.receive()
        waited[-1] += now() - began
        batch = list(waiting)
        if any(worker == protocol.STOP_INFERENCE for worker, _, _, _ in batch):
            return
        server.serve(batch)
        for worker, split, _, _ in batch:
            workers[worker].send(protocol.ACT, split)


def _main(config: InferenceWorkerConfig, fds: list[int]) -> None:
    slab_fd, weights_fd, requests, *workers = fds
    protocol.do_not_preempt()
    sys.path[:] = config.import_path
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    # Inside an outermost autocast, which this counts as, weights in lower precision are kept from
    # one forward pass to the next: casting them takes as long as 10 pictures. Pulls forget them.
    torch.autocast_increment_nesting()
    slab = Slab(config.layout, slab_fd)
    policy = pickle.loads(config.policy)()
    store = WeightStore.attach(config.weight_specs, weights_fd)
    server = PolicyServer(policy, slab, store, config.server)
    with contextlib.suppress(PipeClosedError):
        serve_forever(
            server, PipeReader(requests), [PipeWriter(fd) for fd in workers], slab.numpy(WAITED)
        )


if __name__ == "__main__":
    protocol.run_child(_main)
