"""The model that ``edgeds doctor --prove`` builds when no bundle is given: one INT8 convolution, made for this purpose.

Input ``x`` float32 [batch, 3, height, width]; QuantizeLinear, DequantizeLinear, Conv 3x3 to 8 channels, INT8 weights
(random, seed 7), Relu; output ``y`` float32 [batch, 8, height, width]. Opset 17, IR 8, written with onnx.helper once,
so that a device needs no onnx. The references beside it are computed with numpy alone, independently of any runtime.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np

from edgeds.bundle import Manifest, write_bundle
from edgeds.specs import Resolution, TensorSpec

INPUT_SCALE = 1 / 127
SIZES = (Resolution(32, 32), Resolution(48, 64))
PROOF_MODEL = (
    "CAgSADq+BQopCgF4CgJ4cwoCeHoSAnhxGghxdWFudGl6ZSIOUXVhbnRpemVMaW5lYXIKLgoCeHEKAnhzCgJ4ehICeGQaCmRlcXVh"
    "bnRpemUiEERlcXVhbnRpemVMaW5lYXIKNwoBdwoCd3MKAnd6EgJ3ZBoHd2VpZ2h0cyIQRGVxdWFudGl6ZUxpbmVhcioLCgRheGlz"
    "GACgAQIKRAoCeGQKAndkCgFiEgFjGgRjb252IgRDb252KhUKDGtlcm5lbF9zaGFwZUADQAOgAQcqEQoEcGFkc0ABQAFAAUABoAEH"
    "ChIKAWMSAXkaBHJlbHUiBFJlbHUSBXByb29mKugBCAgIAwgDCAMQA0IBd0rYAXEgL2UURlW6j83JX2mCAFKiTJ/4Uc7YxzjBffL6"
    "ARUOAn5OSzMf1333t1ipWx2ejPKKpQR4909qUiHxBMT/4cB+hJmyeDFhtDjf/YEeVCqoCcV3YbACcFk1JIs++Zi/CjoCHV8v3SUZ"
    "nJAp4xnTuqfiUefhE3rlF/Eb8iMMLXSnEPHcvo7nU5nod3O3giyEzf9fmCkIolhY/HEbZ3USyKYQskBtvw2Nr+FieCQVEpDge+m3"
    "vjaKeGAR+EMM+tPyQI+HON9NiGig63ecKDrulQbvXy7YjxfILyoqCAgQAUICd3NKIHSRsDrSWtI63ZQCO6pvETswY4Y6G/ATO/KM"
    "UDqvUAE7KhIICBADQgJ3ekoIAAAAAAAAAAAqKQgIEAFCAWJKIDJi/j0NyBS+Rt4EvQQhAT5b9Ea+2XhSPYQL8D3JcKo7KgwQAUIC"
    "eHNKBAQCATwqCRADQgJ4ekoBAForCgF4EiYKJAgBEiAKBxIFYmF0Y2gKAggDCggSBmhlaWdodAoHEgV3aWR0aGIrCgF5EiYKJAgB"
    "EiAKBxIFYmF0Y2gKAggICggSBmhlaWdodAoHEgV3aWR0aEIECgAQEQ=="
)

WEIGHTS = (
    "cSAvZRRGVbqPzclfaYIAUqJMn/hRztjHOMF98voBFQ4Cfk5LMx/Xffe3WKlbHZ6M8oqlBHj3T2pSIfEExP/hwH6EmbJ4MWG0ON/9"
    "gR5UKqgJxXdhsAJwWTUkiz75mL8KOgIdXy/dJRmckCnjGdO6p+JR5+ETeuUX8RvyIwwtdKcQ8dy+judTmeh3c7eCLITN/1+YKQii"
    "WFj8cRtndRLIphCyQG2/DY2v4WJ4JBUSkOB76be+Nop4YBH4Qwz60/JAj4c4302IaKDrd5woOu6VBu9fLtiPF8gv"
)
"""int8 [8, 3, 3, 3], little-endian; the same bytes are inside the model."""

WEIGHT_SCALES = "dJGwOtJa0jrdlAI7qm8ROzBjhjob8BM78oxQOq9QATs="
"""float32 [8], little-endian; the same bytes are inside the model."""

BIAS = "MmL+PQ3IFL5G3gS9BCEBPlv0Rr7ZeFI9hAvwPclwqjs="
"""float32 [8], little-endian; the same bytes are inside the model."""


def write_proof_bundle(folder: Path) -> Path:
    """Write the bundle of the model above with golden samples at both sizes; returns ``folder``."""
    arrays: dict[str, np.ndarray] = {}
    for index, size in enumerate(SIZES):
        x = np.random.default_rng(index).uniform(-1, 1, (2, 3, size.height_px, size.width_px)).astype(np.float32)
        arrays |= {
            f"input/{index}/x": x,
            f"float/{index}/y": reference(x),
            f"int8/{index}/y": reference(quantize(x)),
        }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    manifest = Manifest(
        task="proof",
        models={"int8": "model.onnx"},
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 3, "height", "width")),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 8, "height", "width")),),
        buckets=SIZES,
        max_batch=4,
        precision="int8",
        license="Apache-2.0",
    )
    files: dict[str, Path | bytes] = {"model.onnx": base64.b64decode(PROOF_MODEL), "golden.npz": buffer.getvalue()}
    return write_bundle(folder, files=files, manifest=manifest)


def quantize(x: np.ndarray) -> np.ndarray:
    """QuantizeLinear then DequantizeLinear with zero point 0: round half to even, clip to int8 (ONNX)."""
    scale = np.float32(INPUT_SCALE)
    return np.asarray(np.clip(np.rint(x / scale), -128, 127).astype(np.float32) * scale)


def reference(x: np.ndarray) -> np.ndarray:
    """Conv 3x3 (padding 1) with bias, then Relu: [n, 3, h, w] to [n, 8, h, w], computed in float64."""
    weights = np.frombuffer(base64.b64decode(WEIGHTS), np.int8).reshape(8, 3, 3, 3)
    scales = np.frombuffer(base64.b64decode(WEIGHT_SCALES), "<f4").reshape(8, 1, 1, 1)
    bias = np.frombuffer(base64.b64decode(BIAS), "<f4").reshape(1, 8, 1, 1)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    summed = np.einsum("nchwij,ocij->nohw", windows, weights * scales.astype(np.float64))
    return np.asarray(np.maximum(summed + bias, 0.0).astype(np.float32))
