"""What an engine depends on, as one value with one digest: equal keys mean that a finished engine can be used again.

Part of the key: the model's content, the builder options that change the plan, the profiles, the TensorRT version and
the GPU. Not part of it: the power mode, free memory, where the timing cache lies, and the order in which things were
given.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeds.bundle import Bundle
from edgeds.specs import ShapeRange, to_json

Profile = Mapping[str, ShapeRange]

# Fields of BuildOptions that do not change what the plan computes or where it runs.
NOT_IN_THE_PLAN = ("profiles", "timing_cache", "quiet", "verbose")
DIGEST_CHARS = 24
"""Hex digits of the folder name: 96 bits, no collisions by chance, and short enough for every file system."""


@dataclass(frozen=True, kw_only=True)
class DeviceIdentity:
    """The GPU an engine is built for. ``board`` is a Jetson's module number: all Orins call their GPU "Orin".

    ``gpu`` is None for an engine built ahead of time for every GPU of a compute capability (TensorRT-RTX).
    """

    gpu: str | None
    compute_capability: str
    board: str | None = None

    def __str__(self) -> str:
        name = self.gpu or "any RTX GPU"
        return f"{name}{f' on {self.board}' if self.board else ''} (compute capability {self.compute_capability})"


@dataclass(frozen=True, kw_only=True)
class EngineKey:
    """Everything an engine depends on; build it with ``engine_key`` so that it is normalised."""

    model_sha256: str
    options: Mapping[str, Any]
    profiles: tuple[Profile, ...]
    tensorrt: str
    device: DeviceIdentity

    def digest(self) -> str:
        """The fingerprint: hex, ``DIGEST_CHARS`` long."""
        return _digest({**self._base(), "profiles": to_json(self.profiles)})

    def same_but_profiles(self, other: EngineKey) -> bool:
        """Whether the two differ in nothing but their profiles."""
        return _digest(self._base()) == _digest(other._base())

    def serves(self, other: EngineKey) -> bool:
        """Whether an engine of this key can do all that ``other`` asks for: equal, or with wider profiles."""
        return self.same_but_profiles(other) and profiles_cover(self.profiles, other.profiles)

    def _base(self) -> dict[str, Any]:
        return {
            "model_sha256": self.model_sha256,
            "options": to_json(self.options),
            "tensorrt": self.tensorrt,
            "device": to_json(self.device),
        }


def engine_key(
    *,
    model_sha256: str,
    options: Any,
    profiles: Sequence[Profile],
    tensorrt: str,
    device: DeviceIdentity,
) -> EngineKey:
    """An EngineKey with options and profiles in one order. ``tensorrt`` is product and version in words.

    ``options`` is a BuildOptions (any dataclass). Values left at their default are left out, so that a new option in
    a later release does not make existing engines worthless.
    """
    return EngineKey(
        model_sha256=model_sha256,
        options=normalise_options(options),
        profiles=normalise_profiles(profiles),
        tensorrt=tensorrt,
        device=device,
    )


def fingerprint(key: EngineKey) -> str:
    """Name of the folder an engine of this key is kept in."""
    return key.digest()


def normalise_options(options: Any) -> dict[str, Any]:
    """Options that differ from their defaults and change the plan, as sorted JSON values."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name in NOT_IN_THE_PLAN or value == default:
            continue
        # The order of a list of flags or targets has no meaning for the builder.
        plain = to_json(value)
        values[field.name] = sorted(plain, key=repr) if isinstance(plain, list) else plain
    return dict(sorted(values.items()))


def normalise_profiles(profiles: Sequence[Profile]) -> tuple[Profile, ...]:
    """Inputs sorted by name, profiles sorted by their shapes, each profile once."""
    ordered = [dict(sorted(profile.items())) for profile in profiles]
    unique = {json.dumps(to_json(profile)): profile for profile in ordered}
    return tuple(unique[text] for text in sorted(unique))


def profiles_cover(wide: Sequence[Profile], narrow: Sequence[Profile]) -> bool:
    """Whether every profile of ``narrow`` lies within one profile of ``wide``. No profiles: a model of fixed shapes."""
    if not narrow:
        return not wide
    return all(any(_covers(outer, inner) for outer in wide) for inner in narrow)


def _covers(outer: Profile, inner: Profile) -> bool:
    if set(outer) != set(inner):
        return False
    for name, asked in inner.items():
        have = outer[name]
        if len(have.min) != len(asked.min):
            return False
        if any(low > wanted for low, wanted in zip(have.min, asked.min, strict=True)):
            return False
        if any(high < wanted for high, wanted in zip(have.max, asked.max, strict=True)):
            return False
    return True


def model_digest(bundle: Bundle, variant: str) -> str:
    """SHA-256 over a model's files: the ONNX and its external data, from the manifest's checked entries."""
    name = bundle.manifest.models[variant]
    parts = [name, *(extra for extra in (f"{name}.data",) if extra in bundle.manifest.files)]
    if len(parts) == 1:
        return bundle.manifest.files[name].sha256
    return hashlib.sha256("".join(bundle.manifest.files[part].sha256 for part in parts).encode()).hexdigest()


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]
