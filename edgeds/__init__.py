"""edgeds: prune, calibrate, pack and run models on embedded NVIDIA GPUs, inside a power budget.

Importing this package loads nothing heavy; public names load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from edgeds._version import __version__

_PUBLIC = {
    "EdgedsError": "edgeds.errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'edgeds' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
