"""Find where a checkpoint's elements are in a model's parameters, by tracing the model's own loader.

The loader runs on tensors without content. Each copy from a part of a checkpoint's tensor to a part of a parameter
is recorded instead of executed, so fused and tied layers and tensor parallelism need no special rules. A loader
that computes something, for example to convert or join tensors, cannot be traced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class LoaderNotTraced(Exception):
    """This model's loader cannot be traced. The model is unchanged."""


@dataclass(frozen=True, slots=True)
class Part:
    """A view of a checkpoint's tensor (offset, sizes and strides in elements) and its view in a parameter."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    target: Any  # a view of a parameter with the same sizes

    def of(self, tensor: Any) -> Any:
        """Return this part of a contiguous tensor."""
        return tensor.as_strided(self.sizes, self.strides, self.offset)

    def write(self, places: Any, values: Any) -> bool:
        """Write new values of the checkpoint's tensor to the parameter, and read them back.

        Returns whether the parameter holds all values of this part.

        Args:
            places: flat indices into the checkpoint's tensor; int64, ascending, on the parameter's device.
            values: on the parameter's device.
        """
        end = self.offset + 1 + sum((size - 1) * stride for size, stride, _ in self._dims)
        first, last = torch.searchsorted(places, torch.tensor([self.offset, end], device=places.device)).tolist()
        rest, values = places[first:last] - self.offset, values[first:last].to(self.target.dtype)
        if [stride for _, stride, _ in self._dims] == [1]:
            at = rest * self._dims[0][2]
        else:
            at, inside = torch.zeros_like(rest), torch.ones_like(rest, dtype=torch.bool)
            for size, stride, step in self._dims:
                along = rest.div(stride, rounding_mode="floor")
                inside &= along < size
                at += along * step
                rest = rest - along * stride
            inside &= rest == 0
            at, values = at[inside], values[inside]
        span = 1 + sum((size - 1) * step for size, _, step in self._dims)
        flat = self.target.as_strided((span,), (1,), self.target.storage_offset())
        flat[at] = values
        return bool(torch.equal(bits(flat[at]), bits(values)))

    @property
    def _dims(self) -> list[tuple[int, int, int]]:
        """Size, stride and the target's stride of each dimension, by descending stride, merged where possible."""
        dims = list[tuple[int, int, int]]()
        all_dims = zip(self.sizes, self.strides, self.target.stride(), strict=True)
        for size, stride, step in sorted(all_dims, key=lambda dim: -dim[1]):
            if dims and dims[-1][1:] == (stride * size, step * size):
                dims[-1] = dims[-1][0] * size, stride, step
            elif size > 1:
                dims.append((size, stride, step))
        return dims


Places = dict[str, list[Part]]  # by name of the checkpoint's tensor; empty if this model does not use it


def places_of(model: Any, tensors: Mapping[str, tuple[Any, tuple[int, ...]]]) -> Places:
    """Find the places of tensors in a model's parameters. Raises LoaderNotTraced.

    Args:
        model: a vLLM model; its `load_weights` is called without changing anything.
        tensors: torch's type and the shape by name in the checkpoint.
    """
    owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters() if parameter.numel()}
    recorder = _CopyRecorder({}, owned, {name: [] for name in tensors})
    with torch.no_grad():
        for name, (dtype, shape) in tensors.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            recorder.names[empty.untyped_storage()._cdata] = name, empty
        try:
            with recorder:
                model.load_weights((name, tensor) for name, tensor in list(recorder.names.values()))
        except Exception as error:  # a loader may raise anything for tensors without content
            raise LoaderNotTraced(f"{type(error).__name__}: {error}") from error
    return recorder.places


def bits(tensor: Any) -> Any:
    """View a tensor's elements as integers, so that NaN equals itself and -0.0 differs from 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


@dataclass
class _CopyRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch has no types where this is checked
    """Records copies of the named tensors into parameters, and changes nothing."""

    names: dict[int, tuple[str, Any]]  # by storage
    owned: set[int]  # storages of parameters
    places: Places = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        named = [value for value in _flattened([*args, *kwargs.values()]) if self._name(value)]
        if func is aten.copy_.default and self._name(args[1]):
            self._record(args[0], args[1])
            return args[0]
        if func is aten._to_copy.default and named and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            return aten.detach.default(args[0])  # a move to a device, and there is no content to move
        if named and not func.is_view:
            raise LoaderNotTraced(f"{self._name(named[0])} is an argument of {func}")
        if func._schema.is_mutable:
            return args[0]
        return func(*args, **kwargs)

    def _name(self, tensor: Any) -> str:
        return self.names.get(tensor.untyped_storage()._cdata, ("", None))[0] if torch.is_tensor(tensor) else ""

    def _record(self, target: Any, source: Any) -> None:
        name = self._name(source)
        if target.shape != source.shape:
            raise LoaderNotTraced(f"{name} {list(source.shape)} is copied to shape {list(target.shape)}")
        if target.untyped_storage().data_ptr() not in self.owned:
            raise LoaderNotTraced(f"{name} {list(source.shape)} is copied to a tensor that is not a parameter")
        self.places[name].append(Part(source.storage_offset(), tuple(source.shape), source.stride(), target))


def _flattened(values: Iterable[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, list | tuple) else [value])]
