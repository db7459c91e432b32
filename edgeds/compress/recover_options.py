"""How a recovery trains, checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgeds.errors import SpecError

DEFAULT_STEPS = 200
MAX_SAMPLES_MIB = 2048


@dataclass(frozen=True, kw_only=True)
class RecoverOptions:
    """``steps`` or ``minutes`` end the training (neither: 200 steps); the learning rate falls along a cosine over them.

    ``learning_rate``, reached after ``warmup_steps``, is the share of its root mean square that Adam moves a tensor by
    in one step at most. ``mean_decay`` is that of the running mean of the weights, which is what is written.
    ``augment`` varies images. ``qat`` quantizes a float model first and trains it through the rounding. A checkpoint is
    written every ``checkpoint_s`` seconds.
    """

    steps: int | None = None
    minutes: float | None = None
    batch: int = 4
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    warmup_steps: int = 20
    mean_decay: float = 0.99
    clip_norm: float = 10.0
    augment: bool = True
    qat: bool = False
    held_out: int = 8
    seed: int = 0
    device: str = "auto"
    threads: int | None = None
    checkpoint_s: float = 30.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch", 1), ("warmup_steps", 0), ("held_out", 1), ("threads", 1)):
            value = getattr(self, name)
            if value is None and name in ("steps", "threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"{name}: expected a whole number from {least}, got {value!r}")
        for name in ("minutes", "learning_rate", "clip_norm", "checkpoint_s"):
            value = getattr(self, name)
            if value is None and name == "minutes":
                continue
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise SpecError(f"{name}: expected a number above 0, got {value!r}")
        if not 0 <= self.mean_decay < 1:
            raise SpecError(f"mean_decay: expected a number from 0 and below 1, got {self.mean_decay!r}")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the training that is done, 0 to 1 and above."""
        shares = []
        if self.minutes is not None:
            shares.append(elapsed_s / (60.0 * self.minutes))
        if self.steps is not None or self.minutes is None:
            shares.append(step / (self.steps or DEFAULT_STEPS))
        return max(shares)

    def rate(self, step: int, progress: float) -> float:
        """Learning rate of a step: linear warm-up, then a cosine to zero (Loshchilov and Hutter 2017)."""
        warm = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
