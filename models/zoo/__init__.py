"""The zoo: 21 real architectures and 10 micro graphs, exported to ONNX by torch, with inputs beside them.

    from models.zoo.store import MODELS, MICRO_GRAPHS, ensure
    model = ensure("bert")                # exports it (in a process of its own) unless it is there already
    model.path, model.inputs()            # the file; its inputs by name

    python -m models.zoo                  export what is missing, to $ONNXC_ZOO or build/zoo
    python -m models.zoo bert yolo        only these

The weights are random, from a fixed seed; shapes, ops and costs are the real ones. ``store`` needs neither
torch nor transformers: only the export does.
"""
