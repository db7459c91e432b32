"""The value a lint rule returns, and what every rule can look up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onnx import ModelProto

from edgeds.graph.view import GraphView

Level = Literal["info", "warning", "error"]

_ORDER = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know before a TensorRT build: the node (or tensor, or ``model``) and what to do."""

    node: str
    level: Level
    message: str


@dataclass(frozen=True, kw_only=True)
class LintContext:
    """The model and a read-only view of it."""

    model: ModelProto
    view: GraphView


def sorted_findings(found: list[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes; repeated ones once."""
    return sorted(dict.fromkeys(found), key=lambda finding: _ORDER[finding.level])
