"""Make models smaller: calibration, Q/DQ, accuracy checks (workstation half)."""

import edgeds.graph  # noqa: F401  (says which extra is missing where onnx is not installed)
