"""Models of several programs on a GPU: data decides about sizes or about what runs, or values are no tensors.

Programs follow each other on one stream, and what they hand on stays on the GPU. The host waits where it must know a
content: a condition, a size, an argument of a function of the host; it then copies that, and nothing else. What the
host makes goes to the GPU when a program first reads it.

All programs, those too that are compiled when the model runs, share one workspace: arena, order of calls, error words.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from onnxc.errors import InputError
from onnxc.runtime.compiled_model import CUDA, CompiledModel, Outputs
from onnxc.runtime.cuda.arrays import LEGACY, DeviceArray, Incoming, stream_of
from onnxc.runtime.cuda.cublaslt import told
from onnxc.runtime.cuda.model import CudaModel
from onnxc.runtime.cuda.profile import gpu_peaks
from onnxc.runtime.cuda.workspace import Attachable, Workspace
from onnxc.runtime.signature import Tensor
from onnxc.runtime.staged import StagedModel
from onnxc.runtime.staged_clock import Clock
from onnxc.runtime.staged_steps import Part, Sizes, Step, Values
from onnxc.runtime.staged_values import Array, Plain, as_value, on_host

if TYPE_CHECKING:
    from onnxc.report import Report
    from onnxc.roofline import Peaks

Calls = Callable[[tuple[Any, ...]], tuple[Any, ...]]
Copies = dict[int, tuple[Any, DeviceArray]]  # by id of an array of the host's: what keeps that id, and the copy


class CudaStagedModel(Attachable, StagedModel):
    """A model of several programs for a GPU. Call it with numpy arrays or arrays of the GPU (and lists of them, and
    None), from any number of threads: calls run one after the other.
    """

    _program = (CUDA, CudaModel)
    _space: Workspace
    _stream: int  # of the call that is under way

    def __init__(self, manifest: Mapping[str, Any], sections: Mapping[str, Any], **options: Any) -> None:
        self._ordinal = int(options.get("device", 0))
        self._attached = False
        self._lock = threading.RLock()  # while it is brought to its GPU
        self._stream = LEGACY
        self._constants: Copies = {}
        self._copies: Copies = {}  # of the call that is under way
        super().__init__(manifest, sections, **options)
        self._named_stream = "stream" in self._inputs

    def step(self, kind: str) -> type[Step]:
        return CudaPart if kind == "part" else super().step(kind)

    def explain(self) -> Report:
        return told(super().explain())

    def join(self, space: Workspace) -> None:
        """As :meth:`attach`, to a workspace that is shared with others. The GPU's context is current."""
        with self._lock:
            if self._attached:
                return
            if hasattr(self, "_space"):  # it was to be attached before, and there was not enough memory
                space = self._space
            self._space = space
            for part in self._parts:
                cast(CudaModel, part).join(space)
            self._ordinal, self._attached = space.device.ordinal, True

    # ------------------------------------------------------------ calls

    def __call__(self, /, *args: Any, stream: Any = None, **kwargs: Any) -> Outputs:
        """Run the model: as :meth:`onnxc.runtime.cuda.model.CudaModel.__call__`. Where any input is on the GPU, all
        tensors among the outputs are :class:`DeviceArray`s, but for those of strings.
        """
        if self._named_stream and stream is not None:
            kwargs["stream"], stream = stream, None
        if kwargs or len(args) != len(self._inputs):
            args = self._binding.bind(args, kwargs)
        return Outputs(self._names, self._answer(self._with_state(args), stream))

    def _answer(self, args: tuple[Any, ...], stream: Any = None) -> tuple[Any, ...]:
        return self._tried(args, lambda model: cast(CudaStagedModel, model)._run(args, stream))

    def _run(self, args: tuple[Any, ...], stream: Any = None) -> tuple[Any, ...]:
        if not self._attached:
            self.attach()
        space = self._space
        with space.lock, space.device.current():
            chosen = None if stream is None else stream_of(stream)
            found = self._incoming(args, chosen)
            there = [x for x in _flat(found) if isinstance(x, Incoming)]
            space.timeline.check()
            if not there:
                space.timeline.follow(space.own, space.handle(space.own))
                outputs = self.run_on(args, space.own)
                space.timeline.synchronize()
                return tuple([on_host(y) for y in outputs])
            if chosen is None:
                chosen = next((x.stream for x in there if x.stream is not None), LEGACY)
                if any(x.keep is None for x in there):  # its library must be told the stream
                    found = self._incoming(args, chosen)
                    there = [x for x in _flat(found) if isinstance(x, Incoming)]
            handle = space.handle(chosen)
            space.timeline.follow(chosen, handle)
            held = space.follow(there, chosen, handle)
            try:
                given = [self._borrowed(x, chosen, handle) for x in found]
                space.timeline.record(chosen, handle)  # behind what makes the inputs: the host may look at them
                outputs = self.run_on(given, chosen)
                return tuple([self._on_gpu(y) for y in outputs])
            finally:
                space.timeline.record(chosen, handle)
                space.hold(held)

    def run_on(self, args: Sequence[Any], stream: int) -> tuple[Any, ...]:
        """A call on this stream, whose inputs are ready there or on the host: what programs and host steps make of
        them, each output an array of its own.
        """
        self._stream, self._copies = stream, {}
        try:
            values, sizes = self._checked(args)
            taken = {*self._held, *(id(x) for x in _flat(values))}
            return tuple([self._own(y, taken) for y in self._plan.run(values, sizes)])
        finally:
            self._copies = {}

    def _own(self, y: Any, taken: set[int]) -> Any:
        """An output that shares no memory with an input, a constant or an output before it."""
        if isinstance(y, list):
            return [self._own(v, taken) for v in y]
        if not isinstance(y, (np.ndarray, DeviceArray)):
            return y
        if isinstance(y, np.ndarray):
            y = y.copy() if id(y) in taken or not y.flags.writeable else y
        elif id(y) in taken:
            y = self._space.copy(y, self._stream)
        taken.add(id(y))
        return y

    # ------------------------------------------------------------ what goes in

    def _incoming(self, args: Sequence[Any], stream: int | None) -> list[Any]:
        """The inputs with arrays of the GPU as such; others as they are."""
        found = []
        for info, x in zip(self._infos[0], args, strict=True):
            inside = isinstance(info, Plain) and isinstance(x, (list, tuple))
            found.append(self._inside(x, stream) if inside else self._read(x, stream))
        return found

    def _inside(self, values: Sequence[Any], stream: int | None) -> list[Any]:
        return [self._inside(x, stream) if isinstance(x, (list, tuple)) else self._read(x, stream) for x in values]

    def _read(self, x: Any, stream: int | None) -> Any:
        found = self._space.read(x, stream)
        return x if found is None else found

    def _borrowed(self, x: Any, stream: int, handle: Any) -> Any:
        """What `_incoming` found, as arrays of ours."""
        if isinstance(x, list):
            return [self._borrowed(v, stream, handle) for v in x]
        if not isinstance(x, Incoming):
            return x
        if x.dtype is None:
            raise InputError("an array of the GPU has a dtype that no model's input can have")
        return self._space.dense(x, stream, handle)

    def _converted(self, args: Sequence[Any]) -> tuple[Values, Sizes]:
        values: Values = []
        shapes = []
        number = 0
        for info, x in zip(self._infos[0], args, strict=True):
            if isinstance(info, Plain):
                values.append(self._placed(info, x))
                continue
            found = _checked_dtype(info, x) if isinstance(x, DeviceArray) else self._signature.array(number, x)
            values.append(found)
            shapes.append(found.shape)
            number += 1
        return values, self._signature.solve(shapes)

    def _placed(self, info: Plain, x: Any) -> Any:
        return _placed(info.described, x, info.name)

    # ------------------------------------------------------------ while it runs

    def on_gpu(self, x: Array) -> Any:
        """An array of the host's as a program is to have it: copied once in a call, and once for all if it is a
        constant.
        """
        key = id(x)
        found = self._copies.get(key) or self._constants.get(key)
        if found is not None:
            found[1].stream = self._stream  # which follows the one of the call that made it: that may be gone by now
            return found[1]
        if not x.nbytes:
            return x
        copy = self._space.upload(x, self._stream)
        if key in self._held:
            self._constants[key] = x, copy
        else:  # a copy goes with its original
            copies = self._copies
            copies[key] = weakref.ref(x, lambda _: copies.pop(key, None)), copy
        return copy

    def stacked(self, arrays: Sequence[Any]) -> Any:
        if any(isinstance(x, DeviceArray) for x in arrays):
            return self._space.stack([x if isinstance(x, DeviceArray) else self._put(x) for x in arrays], self._stream)
        return super().stacked(arrays)

    def part_of(self, model: CompiledModel, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inner = cast("CudaModel | CudaStagedModel", model)
        inner.join(self._space)
        given = inner._with_state(args)
        if isinstance(inner, CudaModel):
            given = tuple([self.on_gpu(x) if isinstance(x, np.ndarray) else x for x in given])
        return inner.run_on(given, self._stream)

    def _put(self, x: Array) -> DeviceArray:
        return self._space.upload(x, self._stream)

    def _on_gpu(self, y: Any) -> Any:
        """An output of a call with arrays of the GPU."""
        if isinstance(y, list):
            return [self._on_gpu(v) for v in y]
        return self._put(y) if isinstance(y, np.ndarray) and y.dtype != object else y

    # ------------------------------------------------------------ facts

    def synchronize(self) -> None:
        """Waits for all calls.

        Raises:
            RunError: one of them failed.
        """
        if self._attached:
            with self._space.device.current():
                self._space.timeline.synchronize()

    def trim(self) -> None:
        if not self._attached:
            return
        with self._space.lock, self._space.device.current():
            self._space.timeline.synchronize()
            self._constants.clear()
            super().trim()

    def _peaks(self) -> Peaks:
        self.attach()
        with self._space.device.current():
            return gpu_peaks(self._space.device)


class CudaPart(Part):
    """A program on a GPU."""

    model: CudaStagedModel
    call: Calls

    def __init__(self, described: Mapping[str, Any], model: StagedModel) -> None:
        super().__init__(described, model)
        self.program = cast(CudaModel, self.part)
        self.call = self._called

    def _called(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.program.run_on(self._given(args), self.model._stream)

    def _given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([self.model.on_gpu(x) if type(x) is np.ndarray else x for x in args])

    def timed(self, values: Values, sizes: Sizes, clock: Clock) -> None:
        self.call = lambda args: clock.part(self.kernel, self.program, self._given(args))
        try:
            self.run(values, sizes)
        finally:
            self.call = self._called


def _flat(values: Sequence[Any]) -> list[Any]:
    """The values, and those in lists."""
    found = []
    for x in values:
        found += _flat(x) if isinstance(x, list) else [x]
    return found


def _checked_dtype(info: Tensor, x: DeviceArray) -> DeviceArray:
    if x.element is not info.dtype:
        raise InputError(f"input {info} expects dtype {info.dtype.name}; {x.element.name} was given")
    return x


def _placed(described: Sequence[Any] | None, x: Any, name: str) -> Any:
    """A value that is no tensor of a known rank: as `as_value`, where arrays of the GPU may be in it."""
    if described is not None and described[0] == "sequence" and isinstance(x, (list, tuple)):
        return [_placed(described[1], v, name) for v in x]
    if not isinstance(x, DeviceArray):
        return as_value(described, x, name)
    shape = np.broadcast_to(np.empty((), x.dtype), x.shape)  # of the same type, without its memory
    as_value(described[1] if described is not None and described[0] == "optional" else described, shape, name)
    return x
