"""The training loop of a recovery: batches, Adam along a cosine, a running mean of the weights, checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgeds.compress.recover_augment import vary
from edgeds.compress.recover_loss import Target, total_loss
from edgeds.compress.recover_options import RecoverOptions
from edgeds.compress.recover_state import TrainingFacts, TrainingState, load_state, save_state
from edgeds.compress.torch_graph import TorchGraph
from edgeds.compress.torch_lib import import_torch
from edgeds.errors import CalibrationError, SpecError
from edgeds.progress import track

Feed = dict[str, np.ndarray]
LEAST_MAGNITUDE = 1e-3
"""Tensors of zeros (biases before training) have to move too."""
_TICKS = 1000


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What is learned from what. ``stacks``: samples of one shape may share a batch. ``image``: the input to vary."""

    targets: tuple[Target, ...]
    classes: int | None
    train: tuple[Feed, ...]
    held_out: tuple[Feed, ...]
    image: str | None
    stacks: bool


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The weights to write. ``kept``: training helped on held-out samples, otherwise they are the first ones."""

    weights: dict[str, Any]
    facts: TrainingFacts
    loss_after: float
    kept: bool


class Trainer:
    """One recovery. ``begin`` or ``resume`` first, then ``train``."""

    def __init__(
        self, student: TorchGraph, teacher: TorchGraph, *, lesson: Lesson, options: RecoverOptions, state: Path
    ) -> None:
        torch = import_torch()
        self.state = state
        self._student, self._teacher = student, teacher
        self._lesson, self._options = lesson, options
        self._want = frozenset(target.tensor for target in lesson.targets)
        self._optimizer = torch.optim.AdamW(
            _by_magnitude(student.parameters), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self._first = {name: value.detach().clone() for name, value in student.parameters.items()}
        self._mean = {name: value.detach().clone() for name, value in student.parameters.items()}
        self._facts = TrainingFacts(digest="", step=0, elapsed_s=0.0, loss_before=math.nan)
        self._recent: list[float] = []
        self._saved = 0

    def begin(self, digest: str) -> None:
        """Start anew: measures the loss to beat, and writes the first checkpoint while a full disk costs nothing."""
        before = self._held_out_loss()
        if not math.isfinite(before):
            raise CalibrationError(
                "the loss is not finite before any training: check the samples, and both models on them"
            )
        self._facts = TrainingFacts(digest=digest, step=0, elapsed_s=0.0, loss_before=before)
        self._save()

    def resume(self, digest: str) -> None:
        """Go on from the checkpoint. Raises SpecError when it belongs to other models, samples or options."""
        found = load_state(self.state)
        if found.facts.digest != digest:
            raise SpecError(
                f"{self.state}: belongs to other models, samples or options; use the same ones, or delete it"
            )
        torch = import_torch()
        parameters = self._student.parameters
        for name, value in parameters.items():
            with torch.no_grad():
                value.copy_(found.weights[name].to(value.device))
            self._mean[name] = found.mean[name].to(value.device)
            if name in found.first:
                self._optimizer.state[value] = {
                    "step": torch.tensor(float(found.facts.step)),
                    "exp_avg": found.first[name].to(value.device),
                    "exp_avg_sq": found.second[name].to(value.device),
                }
        self._facts, self._saved = found.facts, found.facts.step

    def train(self, *, quiet: bool) -> Outcome:
        """Train to the end. On Ctrl-C a checkpoint is written before KeyboardInterrupt goes on."""
        try:
            for _ in track(self._ticks(), what="recovering", total=_TICKS, unit="permille", quiet=quiet):
                pass
        except KeyboardInterrupt:
            self._save()
            raise
        self._close_tenth()
        return self._outcome()

    def _outcome(self) -> Outcome:
        torch = import_torch()
        trained = {name: value.detach().clone() for name, value in self._student.parameters.items()}
        best: tuple[float, dict[str, Any], bool] = (self._facts.loss_before, self._first, False)
        for weights in (self._mean, trained):
            with torch.no_grad():
                for name, value in self._student.parameters.items():
                    value.copy_(weights[name])
            loss = self._held_out_loss()
            if loss < best[0]:
                best = (loss, weights, True)
        return Outcome(weights=best[1], facts=self._facts, loss_after=best[0], kept=best[2])

    def _ticks(self) -> Iterator[int]:
        """Train, and yield once for every thousandth that is done."""
        options, shown = self._options, 0
        last_save = now = time.monotonic()
        progress = options.progress(self._facts.step, self._facts.elapsed_s)
        while progress < 1.0:
            loss = self._step(self._facts.step, progress)
            self._recent.append(loss)
            before, now = now, time.monotonic()
            self._facts = replace(
                self._facts, step=self._facts.step + 1, elapsed_s=self._facts.elapsed_s + now - before
            )
            if now - last_save >= options.checkpoint_s:
                self._save()
                last_save = time.monotonic()
            tenth = int(progress * 10)
            progress = options.progress(self._facts.step, self._facts.elapsed_s)
            if int(progress * 10) > tenth and progress < 1.0:
                self._close_tenth()
            while shown < min(_TICKS, int(progress * _TICKS)):
                shown += 1
                yield shown

    def _close_tenth(self) -> None:
        if self._recent:
            mean = float(np.mean(self._recent))
            self._facts = replace(self._facts, losses=(*self._facts.losses, mean))
            self._recent = []

    def _step(self, step: int, progress: float) -> float:
        torch = import_torch()
        options = self._options
        for group in self._optimizer.param_groups:
            group["lr"] = options.rate(step, progress) * group["magnitude"]
        self._optimizer.zero_grad(set_to_none=True)
        batches = self._batches(step)
        total = 0.0
        for index, feeds in enumerate(batches):
            loss = self._loss(self._varied(feeds, seed=(options.seed, step, index))) / len(batches)
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(list(self._student.parameters.values()), options.clip_norm)
        if not math.isfinite(total) or not bool(torch.isfinite(norm)):
            raise CalibrationError(
                f"step {step}: the loss is not finite; the weights of step {self._saved} are in {self.state}. "
                f"Check the samples, and go on with --resume and a lower --lr than {options.learning_rate:g}"
            )
        self._optimizer.step()
        decay = min(options.mean_decay, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in self._student.parameters.items():
                self._mean[name].lerp_(value, 1 - decay)
        return total

    def _loss(self, feeds: Feed) -> Any:
        torch = import_torch()
        tensors = self._tensors(feeds)
        with torch.no_grad():
            wanted = self._teacher.run(tensors, want=self._want)
        given = self._student.run(tensors, want=self._want)
        return total_loss(self._lesson.targets, given, wanted, classes=self._lesson.classes)

    def _held_out_loss(self) -> float:
        torch = import_torch()
        with torch.no_grad():
            return float(np.mean([float(self._loss(feed)) for feed in self._lesson.held_out]))

    def _tensors(self, feeds: Feed) -> dict[str, Any]:
        torch = import_torch()
        device = next(iter(self._student.parameters.values())).device
        # Copied: torch warns about arrays it may not write to, such as rows of a file mapped into memory.
        return {name: torch.from_numpy(np.array(array)).to(device) for name, array in feeds.items()}

    def _batches(self, step: int) -> list[Feed]:
        """The samples of a step, chosen by its number alone, so that a resumed run sees the same."""
        lesson = self._lesson
        random = np.random.default_rng((self._options.seed, step))
        count = min(self._options.batch, len(lesson.train))
        chosen = [lesson.train[index] for index in random.choice(len(lesson.train), size=count, replace=False)]
        if not lesson.stacks:
            return chosen
        groups: dict[tuple[object, ...], list[Feed]] = {}
        for feed in chosen:
            groups.setdefault(tuple(array.shape[1:] for array in feed.values()), []).append(feed)
        return [_stack(group) for group in groups.values()]

    def _varied(self, feeds: Feed, *, seed: tuple[int, ...]) -> Feed:
        torch = import_torch()
        name = self._lesson.image
        if not self._options.augment or name is None or feeds[name].dtype.kind != "f":
            return feeds
        images = vary(torch.from_numpy(np.array(feeds[name])), random=np.random.default_rng(seed))
        return {**feeds, name: images.numpy()}

    def _save(self) -> None:
        self._saved = self._facts.step
        moments: dict[str, dict[str, Any]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for name, value in self._student.parameters.items():
            kept = self._optimizer.state.get(value, {})
            for key, found in moments.items():
                if key in kept:
                    found[name] = kept[key]
        save_state(
            TrainingState(
                facts=self._facts,
                weights=dict(self._student.parameters),
                mean=self._mean,
                first=moments["exp_avg"],
                second=moments["exp_avg_sq"],
            ),
            self.state,
        )


def _by_magnitude(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Optimizer groups of tensors of about one root mean square, to a power of two.

    Steps are shares of it (as in Adafactor, arXiv:1804.04235): folded BatchNormalization leaves weights of one network
    that differ a hundredfold, for which no absolute rate is right.
    """
    groups: dict[float, list[Any]] = {}
    for value in parameters.values():
        size = max(float(value.detach().square().mean().sqrt()), LEAST_MAGNITUDE)
        groups.setdefault(2.0 ** round(math.log2(size)), []).append(value)
    return [{"params": values, "magnitude": size} for size, values in groups.items()]


def _stack(feeds: Sequence[Feed]) -> Feed:
    return {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
