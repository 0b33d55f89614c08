"""The options of a compile: the one list of them, what they mean for each stage, and what a saved model keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import numpy as np

from onnxc.codegen.cpp.choices import KernelOptions
from onnxc.codegen.triton.options import MOST_DEPTH, check_precision
from onnxc.errors import InputError
from onnxc.frontends.onnx_dims import plain_shapes
from onnxc.frontends.onnx_file import InputShapes
from onnxc.passes.pipeline import PassOptions
from onnxc.planner.groups import FusionOptions
from onnxc.primitives.host import Avoided
from onnxc.runtime.binding import name_list
from onnxc.runtime.cache import Cache
from onnxc.runtime.cpu import byte_table_cost, level

MODES = ("default", "max-autotune")
ACCURACIES = ("default", "strict")
# What a part of a model is compiled with that waits for the run: a model of several programs keeps it.
_KEPT = (
    "target", "cpu", "fusion", "attention", "integer", "accuracy", "precision", "dtype", "fold_bytes", "memory_limit",
)  # fmt: skip
_PATH = (str, os.PathLike, type(None))
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "target": ((str,), "a name such as 'cpu' or 'cuda:sm_90'"),
    "cpu": ((str,), "a name such as 'native' or 'x86-64-v3'"),
    "cache": ((bool, Cache, *_PATH), "True, False, a folder or a Cache"),
    "base_dir": (_PATH, "a folder"),
    "input_shapes": ((Mapping, type(None)), "a dict of shapes by the inputs' names"),
    "fusion": ((bool, FusionOptions), "True, False or FusionOptions"),
    "threads": ((Integral, type(None)), "a number of threads"),
    "attention": ((Integral, np.bool_), "True or False"),
    "integer": ((Integral, np.bool_), "True or False"),
    "accuracy": ((str,), "a word"),
    "mode": ((str,), "a word"),
    "precision": ((str,), "a word"),
    "device": ((Integral,), "the number of a GPU"),
    "tune_seconds": ((Real, type(None)), "a number of seconds"),
    "tuned": ((bool, Mapping), "True, False or a dict of choices"),
    "record": (_PATH, "a file"),
    "fold_bytes": ((Integral,), "a number of bytes"),
    "memory_limit": ((Integral, type(None)), "a number of bytes"),
}


@dataclass(frozen=True)
class CompileOptions:
    """How a model is compiled: all keyword arguments of :func:`onnxc.compile`, which tells of each, but `progress`.

    Raises:
        InputError: an option is wrong, or two of them contradict each other.
    """

    target: str = "cpu"
    cpu: str = "native"
    threads: int | None = None
    cache: bool | str | os.PathLike[str] | Cache = True
    base_dir: str | os.PathLike[str] | None = None
    input_shapes: InputShapes | None = None
    keep_inputs: Sequence[str] = ()
    fusion: bool | FusionOptions = True
    attention: bool = True
    integer: bool = True
    accuracy: str = "default"
    mode: str = "default"
    tune_seconds: float | None = None
    tuned: bool | Mapping[str, str] = True
    record: str | os.PathLike[str] | None = None
    precision: str = "float32"
    dtype: Any = None  # a name, once it is there
    device: int = 0
    fold_bytes: int = PassOptions.fold_bytes
    memory_limit: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (kinds, words) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise InputError(f"{name} is {words}, not {value!r}")
        if self.memory_limit is not None and self.memory_limit < 0:
            raise InputError(f"memory_limit is a number of bytes, not {self.memory_limit!r}")
        object.__setattr__(self, "keep_inputs", name_list(self.keep_inputs, "keep_inputs"))
        if self.input_shapes is not None:
            object.__setattr__(self, "input_shapes", plain_shapes(self.input_shapes))
        for name in ("fold_bytes", "memory_limit"):  # numpy's integers, say
            if getattr(self, name) is not None:
                object.__setattr__(self, name, int(getattr(self, name)))
        if self.dtype is not None and not isinstance(self.dtype, str):  # as numpy and PyTorch have them
            object.__setattr__(self, "dtype", getattr(self.dtype, "__name__", str(self.dtype)).removeprefix("torch."))
        if self.mode not in MODES:
            raise InputError(f"mode is {' or '.join(map(repr, MODES))}, not {self.mode!r}")
        if self.device and (not self.on_gpu or self.mode != "default"):
            raise InputError(f"device={self.device!r} is for target='cuda' and mode='default' (GPU 0 is measured)")
        check_precision(self.precision)
        if self.precision != "float32" and not self.on_gpu:
            raise InputError(f"precision {self.precision!r} is for GPUs: target='cuda'")
        if self.accuracy not in ACCURACIES:
            raise InputError(f"accuracy is {' or '.join(map(repr, ACCURACIES))}, not {self.accuracy!r}")
        if self.mode != "default" and self.tuned is not True:
            raise InputError(f"mode={self.mode!r} takes what it measures, and tuned={self.tuned!r} says otherwise")

    # ------------------------------------------------------------ what they mean

    @property
    def on_gpu(self) -> bool:
        """Whether the target is a GPU."""
        return self.target != "cpu"

    @property
    def passes(self) -> PassOptions:
        """What the passes do."""
        gpu = self.on_gpu
        return PassOptions(
            self.fold_bytes,
            self.attention and (gpu or self.dtype is None),  # the CPU has a kernel for float32 alone
            self.integer and not gpu,
            packed_halves=gpu,
            half_attention=gpu,
            attention_depth=MOST_DEPTH if gpu else None,
            dtype=self.dtype,
            merge=gpu,
            pairs=gpu and self.fusion_options.epilogue and self.fusion_options.pairs,
            weight_gradients=not gpu,
            weight_products=gpu,
            widen=not gpu,
            positions=not gpu,
            rows=not gpu,
            lift=self.fusion_options.lift and not gpu,
            table_cost=None if gpu or not self.fusion_options.tables else byte_table_cost(level(self.cpu)),
        )

    @property
    def fusion_options(self) -> FusionOptions:
        """What the planner does."""
        if isinstance(self.fusion, FusionOptions):
            return self.fusion
        return FusionOptions(**dict.fromkeys(asdict(FusionOptions()), bool(self.fusion)))

    @property
    def avoided(self) -> Avoided:
        """What the host need not do."""
        options = self.fusion_options
        ends = options.turns and not self.on_gpu
        return Avoided(branches=options.selects, turns=options.turns, sequences=options.stacks, ends=ends)

    @property
    def kernels(self) -> KernelOptions:
        """What the CPU's templates may do."""
        return KernelOptions(winograd=self.accuracy != "strict")

    @property
    def folder(self) -> str | None:
        """`base_dir` as text."""
        return None if self.base_dir is None else os.fspath(self.base_dir)

    def for_device(self) -> CompileOptions:
        """The same, where ``cuda`` means another GPU than the first: for that one's architecture."""
        if not self.device or self.target != "cuda":
            return self
        from onnxc.runtime.cuda.driver import device

        return replace(self, target=f"cuda:{device(self.device).architecture}")

    # ------------------------------------------------------------ handing them on

    def keywords(self) -> dict[str, Any]:
        """For :func:`onnxc.compile`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to_json(self) -> dict[str, Any]:
        """What a model of several programs keeps of them."""
        fusion = self.fusion if isinstance(self.fusion, bool) else asdict(self.fusion)
        return {name: getattr(self, name) for name in _KEPT} | {"fusion": fusion}

    @staticmethod
    def from_json(row: Mapping[str, Any], **others: Any) -> CompileOptions:
        """What was kept, and options that were not."""
        kept = {name: row[name] for name in _KEPT}
        fusion = kept["fusion"]
        kept["fusion"] = fusion if isinstance(fusion, bool) else FusionOptions(**fusion)
        return CompileOptions(**kept, **others)
