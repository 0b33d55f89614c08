"""Two runs of a model differ: where, why, and who is right? `onnxc.compare`, and the `onnxc compare` command."""

from onnxc.tools.compare.core import compare as compare
from onnxc.tools.compare.engines import onnxruntime_runner as onnxruntime_runner
from onnxc.tools.compare.metrics import distance as distance
