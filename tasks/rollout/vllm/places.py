"""Where a checkpoint's elements are in a model's parameters, as the model's own loader says.

The loader is run on tensors without content. What it would copy, a part of the checkpoint's tensor into a part of
a parameter, is written down instead: so fused and tied layers and tensor parallelism need no rule here. A loader
that does anything but copy parts, as where it converts, joins or transposes by computing, is not followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class NotFollowed(Exception):
    """What this model's loader does cannot be written down; the model is as it was."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a checkpoint's tensor, as a view: its offset, sizes and strides in elements; and where it goes."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    target: Any  # a view of a parameter, of the same sizes

    def of(self, whole: Any) -> Any:
        """This part of a tensor that is contiguous."""
        return whole.as_strided(self.sizes, self.strides, self.offset)

    def write(self, places: Any, values: Any) -> bool:
        """Put values that are for these flat places of the checkpoint's tensor where they go, and read them again.

        Returns whether all of those in this part are there.

        Args:
            places: int64, ascending, on the parameter's device, as are the `values`.
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
        """Size, stride and the target's stride of each dimension, widest first, joined where they may be."""
        dims = list[tuple[int, int, int]]()
        all_dims = zip(self.sizes, self.strides, self.target.stride(), strict=True)
        for size, stride, step in sorted(all_dims, key=lambda one: -one[1]):
            if dims and dims[-1][1:] == (stride * size, step * size):
                dims[-1] = dims[-1][0] * size, stride, step
            elif size > 1:
                dims.append((size, stride, step))
        return dims


Places = dict[str, list[Part]]  # by the names of the checkpoint's tensors; none for those that go nowhere here


def places_of(model: Any, tensors: Mapping[str, tuple[Any, tuple[int, ...]]]) -> Places:
    """Where tensors of these types and shapes go.

    Args:
        model: a vLLM model; its `load_weights` is called, and changes nothing.
        tensors: torch's type and the shape of each, by its name in the checkpoint.

    Raises NotFollowed.
    """
    owned = {one.untyped_storage().data_ptr() for one in model.parameters() if one.numel()}
    written = _Writing({}, owned, {name: [] for name in tensors})
    with torch.no_grad():
        for name, (dtype, shape) in tensors.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            written.names[empty.untyped_storage()._cdata] = name, empty
        try:
            with written:
                model.load_weights((name, one) for name, one in list(written.names.values()))
        except Exception as error:  # whatever a loader raises of tensors without content
            raise NotFollowed(f"{type(error).__name__}: {error}") from error
    return written.found


def bits(tensor: Any) -> Any:
    """The same elements as integers: NaN equals itself then, and -0.0 is not 0.0."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


@dataclass
class _Writing(TorchDispatchMode):  # type: ignore[misc]  # torch has no types where this is checked
    """Writes down what would be copied of the named tensors, and changes nothing."""

    names: dict[int, tuple[str, Any]]
    owned: set[int]
    found: Places = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = [one for one in _tensors([*args, *kwargs.values()]) if self._name(one)]
        if func is aten.copy_.default and self._name(args[1]):
            self._copied(args[0], args[1])
            return args[0]
        if func is aten._to_copy.default and ours and kwargs.get("dtype", args[0].dtype) == args[0].dtype:
            return aten.detach.default(args[0])  # to a device: where it has none there is nothing to move
        if ours and not func.is_view:
            raise NotFollowed(f"{self._name(ours[0])} goes through {func}")
        if func._schema.is_mutable:
            return args[0]
        return func(*args, **kwargs)

    def _name(self, tensor: Any) -> str:
        return self.names.get(tensor.untyped_storage()._cdata, ("", None))[0] if torch.is_tensor(tensor) else ""

    def _copied(self, target: Any, source: Any) -> None:
        name = self._name(source)
        if target.shape != source.shape or target.untyped_storage().data_ptr() not in self.owned:
            raise NotFollowed(f"{name} {list(source.shape)} goes into {list(target.shape)}, or into no parameter")
        self.found[name].append(Part(source.storage_offset(), tuple(source.shape), source.stride(), target))


def _tensors(values: Iterable[Any]) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
