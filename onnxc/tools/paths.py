"""Files of models by names that are no text: Linux allows any bytes, and onnxruntime takes UTF-8."""

from __future__ import annotations

import os


def readable(path: str) -> str | bytes:
    """A model's file as onnxruntime takes it: its path, or its bytes where the path is no text.

    The working directory is then the model's folder, where onnxruntime looks for the external data of bytes.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        folder, name = os.path.split(path)
        os.chdir(folder or ".")
        with open(name, "rb") as file:
            return file.read()
    return path
