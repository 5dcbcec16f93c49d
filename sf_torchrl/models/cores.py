"""The core: memory between encoder and decoder."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sf_torchrl.algorithms.stretches import Stretches
from sf_torchrl.config import NetworkConfig


class RecurrentCore(nn.Module):
    """A GRU or LSTM, stepped by the inference worker and run over whole rollouts by the learner.

    The state of one lane is one row of float32 numbers: the hidden state of each layer, then with
    an LSTM the cell state of each.

    Args:
        num_inputs: size of the features that come in.
        config: kind, size and layers.
    """

    def __init__(self, num_inputs: int, config: NetworkConfig) -> None:
        super().__init__()
        kind = nn.LSTM if config.core == "lstm" else nn.GRU
        self.rnn: nn.GRU | nn.LSTM = kind(num_inputs, config.rnn_size, config.rnn_num_layers)
        self.num_outputs = config.rnn_size
        self._parts = 2 if config.core == "lstm" else 1
        self._layers = config.rnn_num_layers * self._parts
        self.state_size = config.rnn_size * self._layers

    def forward(self, features: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step of every row.

        Args:
            features: ``[N, num_inputs]``.
            state: ``[N, state_size]`` before the step.

        Returns:
            ``[N, num_outputs]``, and the state after the step.
        """
        with self._precision(features):
            features = features.float() if features.is_cuda else features
            outputs, after = self.rnn(features.unsqueeze(0), self._to_torch(state))
        return outputs.squeeze(0), self._from_torch(after)

    def run(self, features: Tensor, stretches: Stretches, state: Tensor) -> tuple[Tensor, Tensor]:
        """All steps of a batch of rollouts in one pass, states reset where episodes begin.

        Args:
            features: ``[N, num_inputs]``, a row a step.
            stretches: which rows follow each other.
            state: ``[B, state_size]`` in which each rollout begins.

        Returns:
            ``[N, num_outputs]``, and ``[S, state_size]`` the state after each stretch.
        """
        begins = stretches.begins_rollout.unsqueeze(1)
        begin = torch.where(begins, state[stretches.rollout], 0.0)
        with self._precision(features):
            features = features.float() if features.is_cuda else features
            packed = PackedSequence(features[stretches.order], stretches.batch_sizes)
            outputs, after = self.rnn(packed, self._to_torch(begin))
        return outputs.data[stretches.positions], self._from_torch(after)

    def _precision(self, features: Tensor) -> contextlib.AbstractContextManager[Any]:
        """On CUDA float32: torch's autocast would make it float16 there."""
        if features.is_cuda:
            return torch.autocast("cuda", enabled=False)
        return contextlib.nullcontext()

    def _to_torch(self, state: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """``[N, state_size]`` -> ``[layers, N, size]``, of an LSTM twice."""
        layers = state.reshape(len(state), self._layers, self.num_outputs)
        layers = layers.transpose(0, 1).contiguous()
        if self._parts == 1:
            return layers
        hidden, cell = layers.chunk(2)
        return hidden, cell

    def _from_torch(self, state: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        layers = state if isinstance(state, Tensor) else torch.cat(state)
        return layers.transpose(0, 1).flatten(1).float()
