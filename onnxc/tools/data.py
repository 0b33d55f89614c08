"""Samples for a model out of files: arrays, the ONNX test-data layout, images, sounds, Python.

    for inputs in samples_of("photos/", graph): ...

- `x.npz`: arrays by input name (or i0, i1, ...); `folder/` with `input_0.pb`, ...: one sample, ONNX's own layout;
- a folder of such folders (`test_data_set_0`, ...), of .npz files, of images or of sounds: one sample each;
- an image (png, jpeg, webp, bmp, tiff): for models with one float or uint8 input of 3 or 4 dims. It is scaled to the
  input's size (a dynamic size stays the image's), channels first or last as the input has 1, 3 or 4 of them; floats
  are in 0 to 1;
- a sound (wav): for models with one float input: samples in -1 to 1, mono, as [n], [1, n] or [1, 1, n];
- `file.py:function`: what the function yields, dicts of arrays by input name.
"""

from __future__ import annotations

import importlib.util
import os
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onnxc.errors import InputError
from onnxc.ir.graph import Graph, Value
from onnxc.ir.types import TensorType
from onnxc.tools.inputs import check_regular, inputs_of

Array = np.ndarray[Any, Any]
IMAGES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff"}
SOUNDS = {".wav"}
MOST_PIXELS = 1 << 28


def samples_of(path: str | os.PathLike[str], graph: Graph) -> Iterator[Mapping[str, Any]]:
    """Each sample that a path has for a model (as imported). Raises InputError where nothing fits."""
    text = os.fspath(path)
    file, colon, function = text.rpartition(":")
    if colon and file.endswith(".py"):
        yield from _from_python(Path(file), function, graph)
        return
    place = Path(text)
    if not place.exists():
        raise InputError(f"there is no file {text!r} to read inputs from")
    if not place.is_dir():
        yield _one(place, graph)
        return
    if any(place.glob("input_*.pb")):
        yield inputs_of(place, graph)
        return
    inside = [p for p in sorted(place.iterdir()) if _is_sample(p)]
    if not inside:
        raise InputError(f"{text!r} has no inputs: no input_0.pb, test_data_set_0, .npz, image or sound")
    for p in inside:
        yield _one(p, graph)


def _is_sample(path: Path) -> bool:
    if path.is_dir():
        return any(path.glob("input_*.pb"))
    return path.suffix.lower() in {".npz", *IMAGES, *SOUNDS}


def _one(path: Path, graph: Graph) -> Mapping[str, Any]:
    kind = path.suffix.lower()
    if kind in (*IMAGES, *SOUNDS):
        check_regular(path)
    if kind in IMAGES:
        value = _only_input(graph, path)
        return {value.name: read_image(path, value.t)}
    if kind in SOUNDS:
        value = _only_input(graph, path)
        return {value.name: read_sound(path, value.t)}
    return inputs_of(path, graph)


def _only_input(graph: Graph, path: Path) -> Value:
    if len(graph.inputs) != 1:
        raise InputError(f"{os.fspath(path)!r} is one tensor, and the model has the inputs {graph.input_names}")
    return graph.inputs[0]


def read_image(path: Path, t: TensorType) -> Array:
    """An image as a tensor of this type: [N,] C, H, W or H, W, C, by where the type has 1, 3 or 4."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputError("reading images takes pillow: pip install 'onnxc[images]'", cause=error) from error
    shape = list(t.shape)
    inner = shape[1:] if len(shape) == 4 else shape
    if len(inner) != 3 or not (t.dtype.is_float or t.dtype.name == "uint8"):
        raise InputError(f"an image does not fit an input of type {t}")
    first = inner[0] in (1, 3, 4)
    if not first and inner[2] not in (1, 3, 4):
        raise InputError(f"an input of type {t} has no 1, 3 or 4 channels for an image")
    channels = inner[0] if first else inner[2]
    assert isinstance(channels, int)
    height, width = inner[1:] if first else inner[:2]
    try:
        with Image.open(path) as image:
            if image.width * image.height > MOST_PIXELS:
                raise InputError(f"{os.fspath(path)!r} has {image.width} x {image.height} pixels, which is too many")
            wide = width if isinstance(width, int) else image.width
            high = height if isinstance(height, int) else image.height
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
            pixels = np.asarray(image.convert(mode).resize((wide, high), Image.Resampling.BILINEAR))
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
        raise InputError(f"{os.fspath(path)!r} is not an image that pillow reads ({error})", cause=error) from error
    found = pixels.reshape(high, wide, channels)
    found = found.transpose(2, 0, 1) if first else found
    found = found if t.dtype.name == "uint8" else (found / np.float32(255)).astype(t.dtype.numpy)
    return np.ascontiguousarray(found[None] if len(shape) == 4 else found)


def read_sound(path: Path, t: TensorType) -> Array:
    """A wav file as a tensor of this type, its channels mixed, in -1 to 1; cut or filled up to a size that is fixed."""
    if not t.dtype.is_float or not 1 <= len(t.shape) <= 3:
        raise InputError(f"a sound does not fit an input of type {t}")
    try:
        with wave.open(os.fspath(path), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise InputError(f"{os.fspath(path)!r} is not a wav file of plain samples ({error})", cause=error) from error
    data = data[: len(data) // (width * channels) * (width * channels)]
    if width == 1:
        samples: Array = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
    elif width in (2, 4):
        samples = np.frombuffer(data, f"<i{width}").astype(np.float32) / np.float32(2 ** (8 * width - 1))
    else:
        raise InputError(f"{os.fspath(path)!r} has samples of {8 * width} bits; 8, 16 and 32 are read")
    mono = samples.reshape(-1, channels).mean(axis=1)
    length = t.shape[-1]
    if isinstance(length, int):
        mono = np.pad(mono[:length], (0, max(0, length - mono.size)))
    found: Array = mono.astype(t.dtype.numpy).reshape((1,) * (len(t.shape) - 1) + (-1,))
    return found


def _from_python(path: Path, function: str, graph: Graph) -> Iterator[Mapping[str, Any]]:
    """What a function of a user's file yields. Raises InputError for whatever the file raises."""
    if not path.is_file():
        raise InputError(f"there is no file {os.fspath(path)!r} with a loader")
    for sample in _loaded(path, function):
        if not isinstance(sample, Mapping):
            raise InputError(f"the loader {function!r} gave a {type(sample).__name__}, not a dict of arrays")
        missing = [n for n in graph.input_names if n not in sample]
        if missing:
            raise InputError(f"the loader {function!r} gave {list(sample)}, without the inputs {missing}")
        yield {n: sample[n] for n in graph.input_names}


def _loaded(path: Path, function: str) -> Iterator[Any]:
    what = os.fspath(path)
    spec = importlib.util.spec_from_file_location("onnxc_loader", path)
    if spec is None or spec.loader is None:
        raise InputError(f"{what!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        load = getattr(module, function, None)
        if not callable(load):
            raise InputError(f"{what!r} has no function {function!r}")
        found = load()
        yield from [found] if isinstance(found, Mapping) else found
    except InputError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise InputError(
            f"the loader {function!r} of {what!r} raised {kind} ({error}); --debug shows where", cause=error
        ) from error
