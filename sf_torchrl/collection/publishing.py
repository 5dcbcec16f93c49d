"""The weights' side of a collector: one policy, published by version through a weight store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torchrl.collectors import BaseCollector
from torchrl.weight_update import (
    DistributedWeightSyncScheme,
    NoWeightSyncScheme,
    RayWeightSyncScheme,
    RPCWeightSyncScheme,
    WeightSyncScheme,
)

from sf_torchrl.memory.weights import Weights, WeightStore
from sf_torchrl.models.given_policy import published_module

_REMOTE = (DistributedWeightSyncScheme, RayWeightSyncScheme, RPCWeightSyncScheme)


class PublishingCollector(BaseCollector):
    """A collector whose workers pull the newest weights from shared memory.

    Subclasses set ``policy`` and ``weight_store``.
    """

    policy: nn.Module
    weight_store: WeightStore

    def _set_schemes(self, schemes: Mapping[str, WeightSyncScheme] | None) -> None:
        """Accept TorchRL's schemes: they say which weights are sent; shared memory carries them.

        Raises:
            ValueError: a model other than "policy", or a scheme for other machines.
        """
        for model_id, scheme in (schemes or {}).items():
            if model_id != "policy":
                raise ValueError(
                    f"weight_sync_schemes names the model {model_id!r}; there is one, 'policy'"
                )
            if isinstance(scheme, _REMOTE) or not isinstance(scheme, WeightSyncScheme):
                raise ValueError(
                    f"weight_sync_schemes: {type(scheme).__name__} does not lead to this "
                    "collector's workers, which read shared memory; leave it out"
                )
        self._weight_sync_schemes = dict(schemes) if schemes else None

    def update_policy_weights_(
        self,
        policy_or_weights: Weights | None = None,
        *,
        weights_dict: Mapping[str, Weights] | None = None,
        worker_ids: Any = None,
        **kwargs: Any,
    ) -> None:
        """Publish weights as the next version.

        Args:
            policy_or_weights: module, TensorDict or state dict; None takes the policy given at
                construction.
            weights_dict: ``{"policy": weights}``, as TorchRL's trainers may give it.
            worker_ids: None; there is one inference worker.
            **kwargs: TorchRL's other ways to say the same: ``policy``, ``weights``, ``model_id``.

        Raises:
            ValueError: names or shapes that are not the policy's, a model other than "policy", or
                some workers only.
        """
        unknown = kwargs.keys() - {"policy", "weights", "model_id", "policy_weights"}
        if unknown:
            raise TypeError(
                f"update_policy_weights_() got unexpected arguments {sorted(unknown)}; give "
                "policy, weights or weights_dict"
            )
        if worker_ids is not None:
            raise ValueError(
                f"worker_ids={worker_ids!r}: one inference worker acts for all envs; leave it out"
            )
        if kwargs.get("model_id") not in (None, "policy"):
            raise ValueError(f"there is one model, 'policy'; got model_id={kwargs['model_id']!r}")
        if weights_dict is not None:
            if set(weights_dict) != {"policy"} or policy_or_weights is not None:
                raise ValueError(
                    f"there is one model, 'policy', to update; got {sorted(weights_dict)}"
                )
            policy_or_weights = weights_dict["policy"]
        super().update_policy_weights_(policy_or_weights, **kwargs)

    def _maybe_fallback_update(
        self, policy_or_weights: Weights | None = None, *, model_id: str | None = None
    ) -> None:
        """Publish weights (those of the policy given at construction when None)."""
        source = self.policy if policy_or_weights is None else policy_or_weights
        if isinstance(source, nn.Module):
            source = published_module(source)
        self.weight_store.publish(source)

    def _send_weights_scheme(
        self, *, model_id: str, scheme: WeightSyncScheme, processed_weights: Any, worker_ids: Any
    ) -> None:
        """What TorchRL calls where schemes are registered."""
        if not isinstance(scheme, NoWeightSyncScheme):
            self._maybe_fallback_update(processed_weights, model_id=model_id)

    @property
    def policy_version(self) -> int:
        """Version of the newest weights published, in calls of update_policy_weights_."""
        return self.weight_store.version

    def get_policy_version(self) -> int:
        """:attr:`policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Publish the newest weights again, as the next version."""
        self.weight_store.publish(self.weight_store.newest())

    def get_model(self, model_id: str) -> nn.Module:
        """The policy, by its only name.

        Raises:
            ValueError: any other name than "policy".
        """
        if model_id != "policy":
            raise ValueError(f"there is one model, 'policy'; got {model_id!r}")
        return self.policy

    def getattr_policy(self, attr: str) -> Any:
        """An attribute of the policy."""
        return getattr(self.policy, attr)

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """As :meth:`update_policy_weights_`: a parent's weights are published to the workers."""
        self.update_policy_weights_(*args, **kwargs)
