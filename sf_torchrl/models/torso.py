"""The torso: encoder, core and decoder, from observations to the features that heads read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sf_torchrl.algorithms.stretches import Stretches
from sf_torchrl.config import NetworkConfig
from sf_torchrl.memory.slab import Feature
from sf_torchrl.models.cores import RecurrentCore
from sf_torchrl.models.encoders import Encoder, own_part
from sf_torchrl.models.layers import MLP


class Torso(nn.Module):
    """Encoder, core and decoder.

    Args:
        features: the observation keys.
        config: layers.
    """

    def __init__(self, features: Sequence[Feature], config: NetworkConfig) -> None:
        super().__init__()
        self.encoder = Encoder(features, config)
        size = self.encoder.num_outputs
        self.core = None if config.core == "none" else RecurrentCore(size, config)
        if self.core is not None:
            size = self.core.num_outputs
        self.decoder: nn.Module = (
            MLP(size, config.decoder_mlp_layers, config.nonlinearity)
            if config.decoder == "mlp"
            else own_part("decoder", config.decoder, size, config)
        )
        self.num_outputs = self.decoder.num_outputs

    @property
    def state_size(self) -> int:
        """Numbers in the recurrent state of one lane; 0 without a core."""
        return 0 if self.core is None else self.core.state_size

    def forward(self, observations: Sequence[Tensor]) -> Tensor:
        """``[N, num_outputs]`` features, without a core."""
        return self.decoder(self.encoder(observations))  # type: ignore[no-any-return]

    def step(self, observations: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[N, num_outputs]`` and the state after one step of every row."""
        assert self.core is not None, "forward() does without"
        outputs, after = self.core(self.encoder(observations), state)
        return self.decoder(outputs), after

    def run(
        self,
        observations: Sequence[Tensor],
        stretches: Stretches,
        following: Tensor,
        state: Tensor,
    ) -> Tensor:
        """Features of whole rollouts, and of observations that followed some stretches.

        Args:
            observations: ``[N + M, *shape]`` for each key: N steps, then M that followed.
            stretches: which steps follow each other.
            following: ``[M]`` the stretch whose end each of the last M followed.
            state: ``[B, state_size]`` in which each rollout begins.

        Returns:
            ``[N + M, num_outputs]``.
        """
        assert self.core is not None, "forward() does without"
        count = len(stretches.order)
        encoded = self.encoder(observations)
        outputs, after = self.core.run(encoded[:count], stretches, state)
        if len(following):  # there is none where every rollout ended in a terminal state
            later, _ = self.core(encoded[count:], after[following])
            outputs = torch.cat([outputs, later])
        return self.decoder(outputs)  # type: ignore[no-any-return]
