"""Say what a file that is no ONNX model looks like."""

from __future__ import annotations

from pathlib import Path

from edgeds.engines.plan_file import PLAN_MAGICS
from edgeds.errors import ModelError
from edgeds.files import open_regular

ENGINE_SUFFIXES = (".engine", ".plan", ".trt")


def read_head(path: Path, count: int) -> bytes:
    """First bytes of a file; a directory or an unreadable path is a ModelError."""
    try:
        with open_regular(path) as stream:
            return stream.read(count)
    except IsADirectoryError as error:
        found = sorted(item.name for item in path.glob("*.onnx"))[:3]
        hint = f"; it holds {', '.join(found)}" if found else ""
        raise ModelError(f"{path}: is a directory, not a model file{hint}; name the .onnx file itself") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # an embedded NUL in the path
        raise ModelError(f"{str(path)!r}: not a usable path: {error}") from error


def looks_like(path: Path, head: bytes) -> str | None:
    """What a file is instead of an ONNX model, with advice; None when nothing speaks against ONNX."""
    suffix = path.suffix.lower()
    if not head:
        return "the file is empty; export or copy it again"
    if head[:4] in PLAN_MAGICS or suffix in ENGINE_SUFFIXES:
        return "it is a TensorRT engine, which cannot be edited; give the ONNX it was built from"
    if head[:2] == b"PK":
        return "it is a zip archive (a PyTorch .pt checkpoint is one); export the model to ONNX first"
    if suffix == ".safetensors" or (head[8:9] == b"{" and head[4:8] == b"\0\0\0\0"):
        return "it is a safetensors file, which holds weights without a graph; export the model to ONNX first"
    if head[:4] == b"GGUF":
        return "it is a GGUF file; language models are built from it by the LLM recipe, not read as ONNX"
    if head[:2] == b"\x80\x02" or suffix in (".pt", ".pth"):
        return "it is a PyTorch checkpoint; export the model to ONNX first"
    if head.startswith(b"version https://git-lfs"[:16]):
        return "it is a Git LFS pointer; run 'git lfs pull' to get the file itself"
    if head[:1] in (b"{", b"<"):
        return "it is a text file (JSON or HTML); was an error page saved instead of the model?"
    return None
