"""The backend interface of the onnx package, whose test suite and tools run any runtime through it.

    import onnxc.backend as backend
    rep = backend.prepare(onnx.load("model.onnx"), "CPU")   # or "CUDA", "CUDA:1"
    outputs = rep.run([x, y])                               # outputs[0], outputs.logits

``onnx.backend.test.BackendTest(onnxc.backend.Backend)`` makes the cases of the standard's own suite.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TypeProto, helper
from onnx.backend import base

from onnxc.compiler import compile
from onnxc.errors import InputError, OnnxcError
from onnxc.frontends.onnx_file import MAX_IR_VERSION
from onnxc.frontends.onnx_scope import MAX_OPSET
from onnxc.ir import dtypes
from onnxc.runtime.compiled_model import CompiledModel
from onnxc.runtime.cuda.driver import devices

_DEVICE = re.compile(r"(CPU|CUDA)(?::(\d+))?")


class BackendRep(base.BackendRep):
    """A compiled model, as tools that speak onnx's backend interface call it."""

    def __init__(self, model: CompiledModel) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The outputs, a named tuple in the model's order.

        Args:
            inputs: by name in a mapping; in a list or tuple, in the model's order; or the only one.
            kwargs: ignored, as the interface has it.

        Raises:
            InputError, RunError, LimitError: as a call of the compiled model.
        """
        if isinstance(inputs, Mapping):
            outputs = self.model(**inputs)
        else:
            outputs = self.model(*(inputs if isinstance(inputs, (list, tuple)) else [inputs]))
        named: type[tuple[Any, ...]] = base.namedtupledict("Outputs", outputs.keys())
        return named(*outputs.values())


class Backend(base.Backend):
    """onnxc as a backend. Its methods are the functions of this module."""

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> bool:
        """Whether `prepare` can compile the model (it is compiled to find out)."""
        try:
            cls.prepare(model, device, **kwargs)
        except OnnxcError:
            return False
        return True

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: Any) -> BackendRep:
        """Compiles a model.

        Args:
            model: the model.
            device: ``CPU``, ``CUDA`` or ``CUDA:1``.
            kwargs: options of :func:`onnxc.compile`.

        Raises:
            onnx.checker.ValidationError, ModelError: the model is not valid.
            UnsupportedError: it asks for what onnxc cannot do.
            InputError: there is no such device, or an option is wrong.
        """
        onnx.checker.check_model(model)
        return BackendRep(compile(model, **_options(device, kwargs)))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """The outputs of a model: `prepare`, and one run."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls,
        node: NodeProto,
        inputs: Any,
        device: str = "CPU",
        outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        """The outputs of one node.

        Args:
            node: the node.
            inputs: an array for each input that is not left out (in a mapping: by name).
            device: ``CPU``, ``CUDA`` or ``CUDA:1``.
            outputs_info: dtype and shape of each output; found out where it is not given.
            kwargs: ``opset_version``, the version of the node's domain (default: the newest); options of
                :func:`onnxc.compile`.

        Raises:
            As `prepare`; InputError where the inputs do not fit the node.
        """
        version = kwargs.pop("opset_version", None)
        model, given = _model_of(node, inputs, outputs_info, version)
        onnx.checker.check_node(node, _context(model))
        return BackendRep(compile(model, **_options(device, kwargs))).run(given)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models can run there: ``CPU`` anywhere, ``CUDA:n`` with so many GPUs and what drives them."""
        try:
            kind, number = _device(device)
            return kind == "CPU" or number < devices()
        except InputError:
            return False


is_compatible = Backend.is_compatible
prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device


def _device(name: str) -> tuple[str, int]:
    """Kind and number of a device."""
    match = _DEVICE.fullmatch(name)
    if match is None or (match[1] == "CPU" and int(match[2] or 0)):
        raise InputError(f"a device is 'CPU', 'CUDA' or 'CUDA:n', not {name!r}")
    return match[1], int(match[2] or 0)


def _options(device: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `compile` for a device."""
    kind, number = _device(device)
    return {**options} if kind == "CPU" else {"target": "cuda", "device": number, **options}


def _context(model: ModelProto) -> onnx.checker.C.CheckerContext:
    """What onnx's checker of nodes needs to know."""
    context = onnx.checker.C.CheckerContext()
    context.ir_version = model.ir_version
    context.opset_imports = {entry.domain: entry.version for entry in model.opset_import}
    return context


def _model_of(
    node: NodeProto,
    inputs: Any,
    outputs_info: Sequence[tuple[np.dtype[Any], tuple[int, ...]]] | None,
    version: int | None,
) -> tuple[ModelProto, dict[str, Any]]:
    """A model of one node, and its inputs by name."""
    names = [name for name in node.input if name]
    if not isinstance(inputs, Mapping):
        given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        if len(given) != len(names):
            raise InputError(f"{node.op_type} has the inputs {names}; {len(given)} are given")
        inputs = dict(zip(names, given, strict=True))
    missing = sorted(set(names) - set(inputs))
    if missing:
        raise InputError(f"{node.op_type} lacks the inputs {', '.join(missing)}")
    infos = [helper.make_value_info(name, _type_of(inputs[name])) for name in dict.fromkeys(names)]
    made = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    for info, (dtype, shape) in zip(made, outputs_info or (), strict=False):
        info.type.CopyFrom(_tensor_type(np.dtype(dtype), shape))
    domain = "" if node.domain == "ai.onnx" else node.domain
    versions = (
        {"": MAX_OPSET, domain: version or onnx.defs.onnx_ml_opset_version()} if domain else {"": version or MAX_OPSET}
    )
    opsets = [helper.make_operatorsetid(name, number) for name, number in versions.items()]
    graph = helper.make_graph([node], "node", infos, made)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=min(MAX_IR_VERSION, onnx.IR_VERSION))
    return model, {info.name: inputs[info.name] for info in infos}


def _type_of(value: Any) -> TypeProto:
    """The ONNX type of an array, or of a list of arrays."""
    if isinstance(value, (list, tuple)):
        return helper.make_sequence_type_proto(_type_of(value[0]) if value else TypeProto())
    array = np.asarray(value)
    return _tensor_type(array.dtype, array.shape)


def _tensor_type(dtype: np.dtype[Any], shape: Sequence[int]) -> TypeProto:
    return helper.make_tensor_type_proto(dtypes.from_numpy(dtype).onnx, shape)
