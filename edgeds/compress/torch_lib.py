"""The one place that imports torch, which only training needs."""

from __future__ import annotations

from typing import Any

from edgeds.errors import MissingDependency, SpecError


def import_torch() -> Any:
    """The torch module. Raises MissingDependency naming the extra ``train``."""
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("torch", extra="train", purpose="training", cause=error) from error
    return torch


def choose_device(name: str) -> str:
    """``auto`` is the first CUDA GPU when there is one. Raises SpecError for a device that torch does not have."""
    torch = import_torch()
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()):
        raise SpecError(f"--device {name!r}: expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise SpecError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices here; use --device cpu")
    return name
