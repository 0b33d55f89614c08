"""Writes a graph at any stage as an ONNX model: every primitive has an ONNX spelling.

    model = to_onnx(graph)                      # a ModelProto that onnxruntime runs
    write_onnx(graph, "stage.onnx")             # with its weights in stage.onnx.data

So onnxruntime can judge each stage of a compile, not only its end. The spelling of a primitive is one entry of the
`SPELLINGS` of its family (`elementwise.py`, `movement.py`, ...). Nodes of an imported graph are written as they are.
Sizes that are symbolic become Shape of a graph input (or what a step on the host reads) and integer arithmetic. Steps
on the host are If, Loop, and the ONNX ops of sequences and optionals (`control.py`, `host.py`). Names are generated;
those of inputs and outputs are the model's own.
"""

from onnxc.export.model import to_onnx, write_onnx
from onnxc.export.spellings import SPELLINGS

__all__ = ["SPELLINGS", "to_onnx", "write_onnx"]
