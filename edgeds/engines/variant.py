"""Which model of a bundle an engine is built from, for a wanted precision and the typing of this TensorRT."""

from __future__ import annotations

from edgeds.bundle import Manifest
from edgeds.errors import SpecError

PRECISIONS = ("auto", "int8", "int4", "float16", "float")
BUILD_PRECISIONS = {"int8": "int8", "int4": "float16", "float16": "float16", "float": "float32"}
"""Ours to the builder's; a weakly typed build turns it into flags."""


def choose_variant(manifest: Manifest, *, precision: str, typing: str) -> tuple[str, str, str | None]:
    """(model variant, precision it runs in, note) for a bundle.

    Strongly typed builds take precision from the model, so they need a variant that has it; weakly typed ones
    (TensorRT older than 10.12) add it by flags. Raises SpecError when the bundle has no such model.
    """
    if precision not in PRECISIONS:
        raise SpecError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
    models = manifest.models
    wanted = precision
    if precision == "auto":
        held = {variant.removesuffix("_fp16") for variant in models}
        wanted = next((name for name in ("int8", "int4", "float16") if name in held), "float")
    strong = {
        "int8": ("int8_fp16", "int8"),
        "int4": ("int4_fp16", "int4"),
        "float16": ("float16",),
        "float": ("float",),
    }
    # TensorRT takes INT4 in strongly typed networks only, also where others are typed weakly.
    weak = {"int8": ("int8",), "int4": strong["int4"], "float16": ("float",), "float": ("float",)}
    for variant in (weak if typing == "weak" else strong)[wanted]:
        if variant in models:
            slow = wanted in ("int8", "int4") and variant == wanted and typing == "strong"
            note = (
                f"the bundle has no {wanted}_fp16 variant, so what is not {wanted.upper()} runs in float32; create it "
                "again"
                if slow
                else None
            )
            return variant, wanted, note
    raise SpecError(
        f"precision {wanted!r}: the bundle has no model for it; it has {', '.join(sorted(models))}; create the bundle "
        "again, or choose another precision"
    )
