"""What the model is: load and save, views, folding, shapes, opsets, cost and lint. Workstation half."""

from edgeds.errors import MissingDependency

# Every module of this package works on onnx's own protobuf classes. Seen here once, so that a machine without onnx gets
# a sentence whichever of them is imported first.
try:
    import onnx as _onnx  # noqa: F401
except ImportError as error:
    raise MissingDependency("onnx", extra="workshop", purpose="reading ONNX models", cause=error) from error
