"""Frontends: everything that turns a user's model into the graph IR.

Installed as ``onnxc.frontends`` (the link ``onnxc/frontends`` points here). A frontend reads one
outside format and builds an ``onnxc.ir`` graph; it knows the IR and the op definitions, and nothing of
the passes, the planner or the code generators. Import from the defining module
(``onnxc.frontends.onnx_file``, say), never from this package: it defines nothing.
"""
