"""Encoded images as arrays, by way of Pillow, which is only needed for this."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from onnxc.errors import LimitError, RunError
from onnxc.host.registry import host_function

Array = np.ndarray[Any, Any]

_MODES = {"RGB": "RGB", "BGR": "RGB", "Grayscale": "L"}
_FORMATS = ("BMP", "JPEG", "JPEG2000", "TIFF", "PNG", "WEBP", "PPM")  # those of the standard


@host_function
def image_decoder(encoded: Array, pixel_format: str = "RGB") -> Array:
    """The pixels of an encoded image, uint8 [height, width, 3], or [height, width, 1] for Grayscale.

    BMP, JPEG, JPEG 2000, TIFF, PNG, WebP and the portable formats. What cannot be decoded gives an empty array
    [0, 0, channels]. LimitError for an image that Pillow finds too large, RunError where it is not installed.
    """
    if pixel_format not in _MODES:
        raise RunError(f"pixel_format is {', '.join(_MODES)}, not {pixel_format!r}")
    if encoded.dtype != np.uint8 or encoded.ndim != 1:
        raise RunError(f"an encoded image is uint8 [bytes], not {encoded.dtype}{list(encoded.shape)}")
    try:
        from PIL import Image
    except ImportError as error:
        raise RunError("ImageDecoder needs the package pillow: pip install onnxc[images]", cause=error) from error
    mode = _MODES[pixel_format]
    try:
        with Image.open(io.BytesIO(encoded.tobytes()), formats=_FORMATS) as image:
            pixels = np.array(image.convert(mode), np.uint8)
    except Image.DecompressionBombError as error:
        raise LimitError(f"an encoded image is too large: {error}", cause=error) from error
    except (OSError, SyntaxError, ValueError, EOFError):
        return np.zeros((0, 0, 1 if mode == "L" else 3), np.uint8)
    if mode == "L":
        return pixels[:, :, None]
    return np.ascontiguousarray(pixels[:, :, ::-1]) if pixel_format == "BGR" else pixels
