"""What is done to a batch between collecting it and handing it over; names are TorchRL's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase, unravel_key
from torchrl.collectors.utils import split_trajectories


@dataclass(frozen=True, kw_only=True)
class PostProcessor:
    """In this order; nothing by default."""

    track_traj_ids: bool = True
    """Keep ``("collector", "traj_ids")``."""
    track_policy_version: bool = True
    """Keep ``policy_version``."""
    set_truncated: bool = False
    """Mark the last step of every rollout as truncated."""
    split_trajs: bool = False
    """One trajectory a row, zero-padded, with ``("collector", "mask")``."""
    postproc: Callable[[TensorDictBase], TensorDictBase] | None = None
    """The user's own."""
    storing_device: torch.device | None = None
    """Where batches are handed over; None leaves them on the CPU."""
    num_envs: int = 1
    """Envs of all workers: an env's trajectory ids are equal modulo it."""

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch as it is handed over; ``batch`` itself may be changed."""
        if not self.track_policy_version:
            del batch["policy_version"]
        if not self.track_traj_ids:
            del batch["collector", "traj_ids"]
            if batch.get("collector").is_empty():
                del batch["collector"]
        if self.set_truncated:
            _set_truncated(batch)
        if self.storing_device is not None:
            batch = batch.to(self.storing_device)
        if self.split_trajs:
            batch = split_trajectories(self._by_env(batch), prefix="collector")
        return batch if self.postproc is None else self.postproc(batch)

    def _by_env(self, batch: TensorDictBase) -> TensorDictBase:
        """Rollouts of one env one after the other: TorchRL splits where the id changes."""
        first_ids = batch.get(("collector", "traj_ids"))[:, 0]
        return batch[(first_ids % self.num_envs).argsort(stable=True)]


def _set_truncated(batch: TensorDictBase) -> None:
    following = batch.get("next")
    for key in list(following.keys(True, True)):
        path = (key,) if isinstance(key, str) else key
        if path[-1] != "truncated":
            continue
        following.get(key)[:, -1] = True
        following.get(unravel_key((*path[:-1], "done")))[:, -1] = True
