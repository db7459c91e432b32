"""Known faults of TensorRT and L4T releases that touch our engines: what happens, when, and what to do.

Each entry cites where it was reported or documented. ``avoid`` entries are worked around by the builder, ``warn`` ones
are shown before a build and by ``edgeds doctor``, ``refuse`` ones stop the build. Conditions that are not given hold
for all; facts that are unknown here (no L4T number, no module) never match a condition on them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["warn", "avoid", "refuse"]
Range = tuple[tuple[int, ...], tuple[int, ...]]
"""First version with the fault, and first version without it: (10, 16), (11,) is all of 10.16 and later 10.x."""


@dataclass(frozen=True, kw_only=True)
class BuildFacts:
    """What is known about a build or a device. ``l4t`` such as ``36.4.7``, ``module`` a part number or None."""

    tensorrt: tuple[int, ...] | None = None
    is_rtx: bool = False
    l4t: str | None = None
    module: str | None = None
    precision: str | None = None
    typing: str | None = None
    uses_dla: bool = False
    is_jetson: bool = False


@dataclass(frozen=True, kw_only=True)
class KnownBug:
    """One fault. ``applies`` refines the version ranges."""

    id: str
    severity: Severity
    what: str
    fix: str
    source: str
    tensorrt: Range | None = None
    l4t: Range | None = None
    applies: Callable[[BuildFacts], bool] = lambda facts: True

    def matches(self, facts: BuildFacts) -> bool:
        if self.tensorrt and (facts.is_rtx or facts.tensorrt is None or not _within(facts.tensorrt, self.tensorrt)):
            return False
        if self.l4t and (facts.l4t is None or not _within(_numbers(facts.l4t), self.l4t)):
            return False
        return self.applies(facts)

    def describe(self) -> str:
        return f"{self.what}; {self.fix} ({self.source})"


def _is_int8(facts: BuildFacts) -> bool:
    return facts.precision == "int8"


KNOWN_BUGS = (
    KnownBug(
        id="strong-typing-gaps",
        severity="avoid",
        tensorrt=((10,), (10, 12)),
        what="strongly typed networks are not complete before TensorRT 10.12",
        fix="built weakly typed, with the FP16 and INT8 flags over the same Q/DQ graph",
        source="NVIDIA/TensorRT, strong typing migration guide",
    ),
    KnownBug(
        id="orin-dequantize-types",
        severity="warn",
        tensorrt=((10, 16), (11,)),
        what="'Could not infer output types for operation: dequantize' on Orin for some strongly typed INT8 graphs",
        fix="keep each DequantizeLinear directly before its Conv or MatMul, of its scale's type, as edgeds does",
        source="github.com/NVIDIA/TensorRT/issues/4832",
        applies=lambda facts: _is_int8(facts) and facts.is_jetson,
    ),
    KnownBug(
        id="orin-calibrators",
        severity="avoid",
        tensorrt=((10, 3), (10, 4)),
        what="INT8 calibrators fail on Orin with TensorRT 10.3",
        fix="edgeds never uses them: INT8 is in the model as Q/DQ",
        source="github.com/NVIDIA/TensorRT/issues/4797",
        applies=lambda facts: _is_int8(facts) and facts.is_jetson,
    ),
    KnownBug(
        id="jetpack7-no-dla",
        severity="refuse",
        tensorrt=((10, 8), (11, 4, 1)),
        what="TensorRT 10.8 to 11.4.0 does not support the DLA of Orin",
        fix="build for the GPU",
        source="NVIDIA TensorRT documentation, Working with DLA",
        applies=lambda facts: facts.uses_dla,
    ),
    KnownBug(
        id="jetpack-unsupported-11",
        severity="warn",
        tensorrt=((11,), (11, 4, 1)),
        what="TensorRT 11.0 to 11.4.0 does not support JetPack",
        fix="use the TensorRT of your JetPack, or 11.4.1 and later with JetPack 7.2.2",
        source="NVIDIA TensorRT migration guide for Jetson",
        applies=lambda facts: facts.is_jetson,
    ),
    KnownBug(
        id="jetpack6-tensorrt11",
        severity="warn",
        tensorrt=((11,), (99,)),
        l4t=((36,), (37,)),
        what="TensorRT 11 does not support JetPack 6",
        fix="use TensorRT 10.3 of JetPack 6.1 and later",
        source="NVIDIA TensorRT 11.4.1 migration guide for Jetson",
    ),
    KnownBug(
        id="tensorrt11-orin-nx-nano",
        severity="warn",
        tensorrt=((11, 4, 1), (12,)),
        what="TensorRT 11.4.1 names AGX Orin and Thor as supported; Orin NX and Nano are not confirmed",
        fix="check the golden result, or stay on the TensorRT of your JetPack",
        source="NVIDIA TensorRT 11.4.1 release notes",
        applies=lambda facts: bool(facts.module and facts.module.startswith("p3767")),
    ),
    KnownBug(
        id="l4t-large-allocations",
        severity="warn",
        l4t=((36, 4, 7), (36, 5)),
        what="L4T 36.4.7 makes large allocations fail (NvMapMemAllocInternalTagged: error 12)",
        fix="update to L4T 36.5 (JetPack 6.2.2), or build right after a reboot",
        source="L4T 36.4.7, the fix of CVE-2025-33177; reported for large models on Orin",
    ),
    KnownBug(
        id="jetpack6-dla-compiler",
        severity="warn",
        l4t=((36,), (37,)),
        what="TensorRT of JetPack 6 does not load without libnvdla_compiler.so, also where no DLA is used",
        fix="install nvidia-l4t-dla-compiler, or mount /usr/lib/aarch64-linux-gnu/nvidia into the container",
        source="reported for slim JetPack 6 images",
        applies=lambda facts: facts.tensorrt is None,
    ),
    KnownBug(
        id="orin-int8-silu-8",
        severity="refuse",
        tensorrt=((8,), (9, 2)),
        what="INT8 Conv followed by SiLU has no implementation on AGX Orin in TensorRT 8.6",
        fix="update to JetPack 6.1 or later (TensorRT 10.3)",
        source="github.com/NVIDIA/TensorRT/issues/3640",
        applies=_is_int8,
    ),
)


def find_known_bugs(facts: BuildFacts, *, severities: Iterable[Severity] | None = None) -> tuple[KnownBug, ...]:
    """Entries that match, most serious first."""
    wanted = tuple(severities) if severities is not None else ("refuse", "warn", "avoid")
    found = [bug for bug in KNOWN_BUGS if bug.severity in wanted and bug.matches(facts)]
    return tuple(sorted(found, key=lambda bug: ("refuse", "warn", "avoid").index(bug.severity)))


def _within(version: tuple[int, ...], span: Range) -> bool:
    # Tuples of unequal length compare as versions do: (10, 16) <= (10, 16, 2) < (11,).
    return span[0] <= version < span[1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))
