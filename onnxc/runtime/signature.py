"""What goes into a model and comes out: names, types and shapes, and the check of what a caller gives.

signature.bind(args, kwargs)      # every input in its place, by position or by name
signature.arrays(values)          # as arrays that a program can read, or an InputError
signature.solve(shapes)           # the numbers of the dynamic dims
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onnxc.errors import InputError, LimitError, SizesError, abridged
from onnxc.ir.dtypes import BY_NAME, DType
from onnxc.runtime.binding import Binding, by_name
from onnxc.runtime.sizes import Size, evaluate, symbols_in

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
_READABLE = (1, 3, 11, 13)  # DLPack's kinds of memory that the host reads: its own, of CUDA and ROCm too, and managed

MOST_BYTES = 1 << 46  # of one tensor, as in runtime.c
_MOST_STRIDE = (1 << 63) - 1  # numpy's limit of an array's bytes, in which a dim of 0 counts as 1


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model, as onnxruntime describes one.

    Attributes:
        name: the model's name.
        dtype: the type of its elements.
        sizes: of its dims, to evaluate.
        dims: of its dims, to show: an int, the name of a dynamic dim, None for a dynamic dim without a name.
    """

    name: str
    dtype: DType
    sizes: tuple[Size, ...]
    dims: tuple[int | str | None, ...]

    @property
    def type(self) -> str:
        """As onnxruntime spells it: ``tensor(float)``."""
        return f"tensor({ {'float32': 'float', 'float64': 'double'}.get(self.dtype.name, self.dtype.name) })"

    @property
    def shape(self) -> list[int | str | None]:
        """One entry for each dim: an int, or the name of a dynamic dim, or None."""
        return list(self.dims)

    def __str__(self) -> str:
        return f"{self.name!r}: {self.dtype.name}{_shown(self.dims)}"

    def to_json(self) -> list[Any]:
        """For a manifest."""
        return [self.name, self.dtype.name, list(self.sizes), list(self.dims)]

    @staticmethod
    def from_json(row: Sequence[Any]) -> Tensor:
        """From a manifest."""
        name, dtype, sizes, dims = row
        if len(sizes) != len(dims):
            raise ValueError(f"{name!r} has {len(sizes)} sizes and {len(dims)} dims")
        if not all(d is None or isinstance(d, (int, str)) for d in dims):
            raise ValueError(f"{name!r} has dims that are neither numbers nor names")
        return Tensor(str(name), BY_NAME[dtype], tuple(sizes), tuple(dims))


def _shown(dims: Sequence[object]) -> str:
    return f"[{', '.join('?' if d is None else abridged(str(d)) for d in dims)}]"


class Signature:
    """The inputs, outputs and dynamic dims of a model.

    Args:
        inputs, outputs: in the model's order.
        symbols: names of the dynamic dims, in the program's order.
        dim_names: the model's own names of them, where it has any.
        equal: pairs of sizes that must agree, and the node that wants it.
        natural: sizes that must not be negative, and the node that makes them.
        defaults, fixed: as of :class:`onnxc.runtime.binding.Binding`.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        symbols: Sequence[str] = (),
        dim_names: Mapping[str, str] | None = None,
        equal: Sequence[tuple[Size, Size, str]] = (),
        natural: Sequence[tuple[Size, str]] = (),
        defaults: Mapping[str, Array] | None = None,
        fixed: Collection[str] = (),
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._binding = Binding(inputs, defaults or {}, fixed)
        self.input_names = self._binding.names
        self.output_names = tuple(t.name for t in outputs)
        self.symbols = tuple(symbols)
        self.dim_names = dict(dim_names or {})
        self.equal, self.natural = tuple(equal), tuple(natural)
        self._places: Mapping[str, str] | None = None  # of a program that is a part: what its symbols are
        self._given: dict[str, tuple[int, int]] = {}  # symbol -> input and axis where its value is read
        for k, tensor in enumerate(self.inputs):
            for axis, size in enumerate(tensor.sizes):
                if isinstance(size, str):
                    self._given.setdefault(size, (k, axis))

    def without_last(self) -> Signature:
        """The same without its last input, for what callers give where the runtime gives that one."""
        asked = (self.symbols, self.dim_names, self.equal, self.natural, self._binding.defaults, self._binding.fixed)
        return Signature(self.inputs[:-1], self.outputs, *asked)

    def inside(self, places: Mapping[str, str]) -> None:
        """Says that these are the inputs and outputs of a part of a model, whose names no user knows; and what its
        symbols are, in the words of the model.
        """
        self._places = places

    @property
    def unsolved(self) -> list[str]:
        """Symbols that no input gives a value."""
        return [s for s in self.symbols if s not in self._given]

    # ------------------------------------------------------------ names

    def bind(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
        """All inputs in the model's order, from those given by position and by name, and defaults.

        Raises:
            InputError: one is unknown, missing or given twice.
        """
        return self._binding.bind(args, kwargs)

    # ------------------------------------------------------------ arrays

    def arrays(self, values: Sequence[object]) -> tuple[Array, ...]:
        """The values as native, aligned, contiguous arrays of the right dtype and rank.

        Raises:
            InputError: names the input, what was expected and what came.
        """
        return tuple([_array(tensor, value) for tensor, value in zip(self.inputs, values, strict=True)])

    def array(self, k: int, value: object) -> Array:
        """As :meth:`arrays`, of one input."""
        return _array(self.inputs[k], value)

    # ------------------------------------------------------------ sizes

    def solve(self, shapes: Sequence[Shape]) -> dict[str, int]:
        """The values of the dynamic dims, by symbol.

        Raises:
            InputError: the shapes contradict the model, or each other.
        """
        try:
            return self._solved(shapes)
        except InputError as error:
            if self._places is None:
                raise
            _, _, what = error.message.partition(" expects ")
            raise InputError(f"a tensor inside of the model was to have {what}") from error

    def _solved(self, shapes: Sequence[Shape]) -> dict[str, int]:
        try:
            values = {s: shapes[k][axis] for s, (k, axis) in self._given.items()}
        except IndexError:
            values = {}
        for tensor, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(tensor.sizes):
                raise _misfit(tensor, f"an array of rank {len(tensor.sizes)}", f"shape {_shown(shape)}")
            for axis, (size, found) in enumerate(zip(tensor.sizes, shape, strict=True)):
                if isinstance(size, int) and size != found:
                    raise _misfit(tensor, f"size {size} in dim {axis}", f"shape {_shown(shape)}")
                if not isinstance(size, int) and evaluate(size, values) != found:
                    raise self._contradiction(tensor, axis, size, values, shape)
        return values

    def _contradiction(
        self, tensor: Tensor, axis: int, size: Size, values: Mapping[str, int], shape: Shape
    ) -> InputError:
        wanted = evaluate(size, values)
        where = f"dim {axis} ({abridged(str(tensor.dims[axis]))})"
        if isinstance(size, str):
            other, other_axis = self._given[size]
            where += f", as in dim {other_axis} of {self.input_names[other]!r}"
        return _misfit(tensor, f"size {wanted} in {where}", f"shape {_shown(shape)}")

    def check(self, values: Mapping[str, int]) -> None:
        """Check what the program takes for granted about the dynamic dims.

        Raises:
            InputError: the model cannot run with these sizes.
        """
        for a, b, node in self.equal:
            x, y = self._evaluate(a, values, node), self._evaluate(b, values, node)
            if x != y:
                text = f"with {self._sizes(values)} the sizes {x} and {y} meet, which must be equal"
                few = symbols_in(a if x < 2 else 0) | symbols_in(b if y < 2 else 0)  # 0: of what was taken to be 1
                raise SizesError(text, node=node, symbols=frozenset(few))
        for size, node in self.natural:
            if self._evaluate(size, values, node) < 0:
                what = "a tensor would have a negative size, or fewer elements than are read"
                raise InputError(f"with {self._sizes(values)} {what}", node=node)

    def _evaluate(self, size: Size, values: Mapping[str, int], node: str | None) -> int:
        try:
            return evaluate(size, values)
        except ZeroDivisionError as error:
            text = f"with {self._sizes(values)} a size divides by zero"  # where 0 may mean another: see Reshape
            raise SizesError(text, node=node, symbols=frozenset(symbols_in(size))) from error

    def _sizes(self, values: Mapping[str, int]) -> str:
        words = (f"{abridged(self.dim_names.get(s) or self._place(s))} = {n}" for s, n in values.items())
        return ", ".join(words) or "these sizes"

    def _place(self, symbol: str) -> str:
        if self._places is not None:
            return self._places.get(symbol, "a size inside of the model")
        k, axis = self._given[symbol]
        return f"dim {axis} of {self.input_names[k]!r}"

    def shown(self, output: Tensor) -> str:
        """What errors call an output."""
        return f"the output {output.name!r}" if self._places is None else "a tensor inside of the model"

    def output_shapes(self, values: Mapping[str, int]) -> list[Shape]:
        """The shapes of the outputs.

        Raises:
            InputError: a size is negative.
            LimitError: an output would be absurdly large.
        """
        shapes = []
        for tensor in self.outputs:
            shape = tuple(self._evaluate(size, values, None) for size in tensor.sizes)
            if any(n < 0 for n in shape):
                raise InputError(f"with {self._sizes(values)} {self.shown(tensor)} would have shape {_shown(shape)}")
            nbytes = math.prod(shape) * tensor.dtype.itemsize
            if nbytes > MOST_BYTES:
                raise LimitError(f"{self.shown(tensor)} would have {nbytes} bytes")
            if math.prod(n or 1 for n in shape) * tensor.dtype.itemsize > _MOST_STRIDE:
                raise LimitError(f"no array has the shape {_shown(shape)}, which {self.shown(tensor)} would have")
            shapes.append(shape)
        return shapes


def _misfit(tensor: Tensor, expected: str, found: str, advice: str = "") -> InputError:
    return InputError(f"input {tensor} expects {expected}; {found} was given{advice}")


def _array(tensor: Tensor, value: object) -> Array:
    wanted = tensor.dtype.numpy
    array = _from_plain(tensor, value) if isinstance(value, _PLAIN) else _from_array(tensor, value)
    if array.ndim != len(tensor.sizes):
        raise _misfit(tensor, f"an array of rank {len(tensor.sizes)}", f"shape {_shown(array.shape)}")
    # Equal dtypes are not always one object: the program's own makes the next look quick.
    try:
        if not (array.flags.c_contiguous and array.flags.aligned):
            array = np.array(array, order="C")
    except MemoryError as error:  # a view of few elements, strided to very many
        raise LimitError(f"no memory for a copy of input {tensor} in one piece ({error})", cause=error) from error
    return array if array.dtype is wanted else array.view(wanted)


# What has no dtype of its own. (numpy's scalars have one, and np.float64 is a float too.)
_PLAIN = (bool, int, float, complex, list, tuple)


def _from_plain(tensor: Tensor, value: object) -> Array:
    """Python's numbers and lists take the input's dtype, where that loses no more than precision."""
    if isinstance(value, np.generic):
        return _from_array(tensor, value)
    try:
        found = np.asarray(value)
        if not _same_kind(found.dtype, tensor.dtype) and found.size:
            raise _misfit(tensor, f"elements of type {tensor.dtype.name}", f"a {type(value).__name__} of {found.dtype}")
        return np.array(value, dtype=tensor.dtype.numpy)
    except (ValueError, TypeError, OverflowError) as error:
        raise _misfit(tensor, "an array", f"a {type(value).__name__} that is none ({error})") from error


def _same_kind(found: np.dtype[Any], wanted: DType) -> bool:
    allowed = {"bool": "b", "int": "biu", "uint": "biu", "float": "biuf", "complex": "biufc"}
    return found.kind in allowed.get(wanted.kind, "OUS")


def _has_dlpack_only(value: object) -> bool:
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__") and not hasattr(value, "__array__")


def _by_dlpack(value: Any) -> Array:
    """numpy would ask for the array first, and then say of one elsewhere that it cannot have it."""
    kind, _ = value.__dlpack_device__()
    if kind not in _READABLE:
        raise BufferError(f"in the memory of a device of DLPack's kind {kind:d}")
    return np.from_dlpack(value)


def _from_array(tensor: Tensor, value: object) -> Array:
    wanted = tensor.dtype.numpy
    if isinstance(value, np.ma.MaskedArray):  # numpy would drop the mask without a word
        raise _misfit(tensor, "an array", "a masked one", "; fill it (.filled), or pass .data and .mask")
    try:
        array = _by_dlpack(value) if _has_dlpack_only(value) else np.asarray(value)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:  # a tensor that needs grad, or is elsewhere
        raise _misfit(tensor, "an array", f"a {type(value).__name__} ({error})") from error
    if array.dtype == wanted:
        return array
    if array.dtype.kind in "UT" and tensor.dtype.kind == "string":  # numpy's own strings
        return array.astype(object)
    if array.dtype.kind != "T" and array.dtype.newbyteorder("=") == wanted:
        return array.astype(wanted)
    came = f"a {type(value).__name__}" if array.dtype == object else str(array.dtype)
    if isinstance(value, Mapping):
        raise InputError(f"input {tensor} expects an array; {came} was given{by_name([value])}")
    convert = f"; .astype({wanted.name!r}) converts it" if _same_kind(array.dtype, tensor.dtype) else ""
    raise _misfit(tensor, f"dtype {tensor.dtype.name}", came, convert)
