"""The run's model, as far as it can be had: its size, and its shape by its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.model_size import NotKnown, find_config
from policies.model.spec import RunSpec
from policies.sizing.shapes import Shape, UnknownShape, shape_of, with_all_params
from policies.weights.adapters import QUANTISED_WORDS
from policies.weights.disks import ModelSize

FindSize = Callable[[RunSpec], ModelSize]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """What is known of it; `unknown` says in a line what is not, and why."""

    params: int | None = None
    stored_bytes: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    shape: Shape | None = None
    unknown: str = ""


def know_model(spec: RunSpec, find_size: FindSize) -> KnownModel:
    """Look for the model: in its folder, in the hub's cache, at the hub."""
    try:
        size = find_size(spec)
    except NotKnown as error:
        config = find_config(spec)
        if not config:
            return KnownModel(unknown=f"{spec.trainer.model}: its size is not known ({error})")
        return _by_shape(spec, config)
    if why := _not_told(spec, size.config):
        return KnownModel(size.params, size.stored_bytes, size.config, None, why)
    try:
        shape = with_all_params(shape_of(size.config), size.params)
    except UnknownShape as error:
        why = f"{spec.trainer.model}: its memory is not known: {error}"
        return KnownModel(size.params, size.stored_bytes, size.config, None, why)
    return KnownModel(size.params, size.stored_bytes, size.config, shape)


def _not_told(spec: RunSpec, config: Mapping[str, Any]) -> str:
    """Why no memory is planned for a model whose size is known; empty where nothing is in the way."""
    told = f"{spec.trainer.model}: its memory is not known"
    if not config:
        return f"{told}: its config.json cannot be had; of a gated model the hub shows it with HF_TOKEN alone"
    asked = spec.grpo.get("model_init_kwargs")
    if config.get("quantization_config") or any(word in str(asked) for word in QUANTISED_WORDS):
        return f"{told}: it is quantised, and how many bytes a weight then takes is not planned"
    return ""


def _by_shape(spec: RunSpec, config: Mapping[str, Any]) -> KnownModel:
    """Without its weights, by its config.json alone; stored in two bytes each, as most are."""
    if why := _not_told(spec, config):
        return KnownModel(config=config, unknown=why)
    try:
        shape = shape_of(config)
    except UnknownShape as error:
        return KnownModel(config=config, unknown=f"{spec.trainer.model}: its size is not known: {error}")
    return KnownModel(shape.params, 2 * shape.params, config, shape)


def asked_once(find_size: FindSize) -> FindSize:
    """The same for one run, with its answer kept: the hub is asked for seconds."""
    answers: list[ModelSize | NotKnown] = []

    def ask(spec: RunSpec) -> ModelSize:
        if not answers:
            try:
                answers.append(find_size(spec))
            except NotKnown as error:
                answers.append(error)
        if isinstance(answers[0], NotKnown):
            raise answers[0]
        return answers[0]

    return ask


def active_params(shape: Shape) -> int:
    """Parameters that a token goes through: of a mixture only the experts that are chosen, and the head, but not
    the embedding, which is looked up."""
    through = shape.text_params - (0 if shape.tied else shape.embedding_params)
    if shape.experts is None:
        return through
    one = shape.experts
    return through - shape.routed_params * (one.count - one.chosen) // one.count
