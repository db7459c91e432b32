"""Lint a model for TensorRT before any build: findings name the node or tensor, one each."""

from __future__ import annotations

from onnx import ModelProto

from edgeds.graph.findings import Finding, LintContext, sorted_findings
from edgeds.graph.lint_ops import lint_float16, lint_int64, lint_ops, lint_opset, lint_shapes, lint_types
from edgeds.graph.lint_qdq import lint_qdq
from edgeds.graph.view import GraphView

__all__ = ["Finding", "lint_model"]

_RULES = (lint_opset, lint_ops, lint_types, lint_shapes, lint_qdq, lint_int64, lint_float16)


def lint_model(model: ModelProto) -> list[Finding]:
    """Findings for TensorRT 8.5 to 11 and TensorRT-RTX, errors first. The model is not changed.

    ``error``: no TensorRT version of that range takes it, or results would be wrong; ``warning``: some refuse it or
    results may change; ``info``: good to know.
    """
    view = GraphView(model)
    context = LintContext(model=view.model, view=view)
    return sorted_findings([finding for rule in _RULES for finding in rule(context)])
