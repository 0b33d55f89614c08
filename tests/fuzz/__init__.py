"""Random valid ONNX models: onnxc against onnxruntime, node by node.

    python -m tests.fuzz --seconds 600          # or: make fuzz SECONDS=600
    python -m tests.fuzz replay build/fuzz/1234 # a model that failed, shrunk

A model grows by nodes that the oracle has run (`grow.py`), so it is valid, and what it should give is known. Every
value has *shadows* beside it (`oracle.py`): what comes out when each operation rounds a little differently. Where
they differ from the value by more than rounding, the node would magnify errors, or decide by them, and is left out.
So what `judge.py` calls different is different; `shrink.py` makes it small.
"""
