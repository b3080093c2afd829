"""Hand the weights of each step to the fleet's client, and publish those that are divided over processes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list

from grpo_orch.tasks.storing.tensors import LazyTensor
from grpo_orch.tasks.trl.canary import canary_of, forget_order
from grpo_orch.tasks.trl.fleet_client import FleetClient
from grpo_orch.tasks.trl.weights import (
    adapter_tensors,
    as_in_checkpoint,
    plain_model,
    stored_buffers,
    whole_weights,
)

Weights = Iterator[tuple[str, torch.Tensor | LazyTensor]]


class Publishing:
    """The weights of one model.

    Args:
        division: how the model is divided over processes: `is_fsdp`, `is_zero3`, and `gather_params`, a context
            in which parameters are whole.
    """

    def __init__(self, model: Any, accelerator: Any, division: Any, client: FleetClient) -> None:
        self._model, self._accelerator, self._division = model, accelerator, division
        self._client = client

    def hand_over(self) -> None:
        """Give the client the present step's weights, which it reads when needed, and their canary.

        If each process has all weights, the first one reads its own. Otherwise reading takes all processes, in
        `publish`. An adapter that is published alone is read without merging.

        Raises Diverged, in the first process, if the weights compute no finite number.
        """
        if not (self._is_divided or self._accelerator.is_main_process):
            return
        self._client.take_canary(canary_of(self._model, self._accelerator.mixed_precision))
        if self._division.is_zero3:
            forget_order(self._accelerator)
        self._client.take_weights(None if self._is_divided else self.weights())

    def publish(self) -> None:
        """Publish weights that are divided over processes: all take part in each read."""
        # In every process: listing the state makes FSDP2 divide again what a forward pass has gathered.
        stored_buffers(plain_model(self._model))
        weights = whole_weights(self._model, self._division.gather_params)
        if not self._accelerator.is_main_process:
            while (name := broadcast_object_list([None])[0]) is not None:
                weights[name].read()
            return

        def read(name: str) -> torch.Tensor:
            broadcast_object_list([name])
            return weights[name].read()

        named = {name: replace(weight, read=functools.partial(read, name)) for name, weight in weights.items()}
        self._client.take_weights(self._as_in_checkpoint(named))
        self._client.publish()
        broadcast_object_list([None])

    def weights(self) -> Weights:
        """Return the tensors to publish, if each process has all weights."""
        if self._client.publishes_adapters:
            return adapter_tensors(self._model)
        return self._as_in_checkpoint(whole_weights(self._model, self._division.gather_params))

    def _as_in_checkpoint(self, named: dict[str, LazyTensor]) -> Weights:
        """Yield weights and stored buffers under the names in the model's own checkpoint."""
        model = plain_model(self._model)
        buffers = {name: LazyTensor.of(buffer) for name, buffer in stored_buffers(model).items()}
        yield from as_in_checkpoint(model, {**named, **buffers}).items()

    @property
    def _is_divided(self) -> bool:
        """Whether no process has all weights."""
        return bool(self._division.is_fsdp or self._division.is_zero3)
