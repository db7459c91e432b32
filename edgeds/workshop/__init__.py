"""From a model to a bundle: the jobs that need both halves (graph and compress, pipelines and reports)."""

import edgeds.graph  # noqa: F401  (says which extra is missing where onnx is not installed)
