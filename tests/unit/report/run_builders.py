"""Run records for tests of reports: a measured run with everything, a predicted one, and a bare one."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from edgeds.report.record import (
    BatchPoint,
    Device,
    LatencyFigures,
    LayerTime,
    PowerFigures,
    Roof,
    RunRecord,
    ThrottleEvent,
    keep_spread,
)
from edgeds.specs import Budget


class Reader(HTMLParser):
    """Tags, their attributes, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


HOSTILE = "<script>alert('x')</script>\"&'><img src=http://evil.example onerror=1>"


def measured(title: str = "yolo11n int8", **changes: Any) -> RunRecord:
    """31.2 FPS at 12.4 W on an Orin NX in 15W mode, as a bench with all sensors would keep it."""
    rng = random.Random(7)
    samples = keep_spread([28 + 4 * rng.random() + (20 if rng.random() < 0.02 else 0) for _ in range(2000)])
    record = RunRecord(
        status="measured",
        title=title,
        date="2026-12-01T04:00:00+00:00",
        device=Device(
            name="NVIDIA Jetson Orin NX",
            board="Jetson Orin NX 16GB",
            mode="15W",
            mode_watts=15.0,
            gpu="ampere_orin",
            backend="tensorrt",
            threads=2,
            versions={"edgeds": "0.1.0", "tensorrt": "10.3.0", "L4T": "36.4"},
        ),
        model="yolo11n",
        precision="int8",
        batch=1,
        sizes=("640x640",),
        fps=31.2,
        frames=936,
        seconds=30.0,
        latency_ms=LatencyFigures(mean_ms=30.5, p50_ms=30.1, p95_ms=32.0, p99_ms=50.9, max_ms=52.0, samples=samples),
        power=PowerFigures(
            mean_w=12.4,
            peak_w=14.1,
            energy_j=372.0,
            duration_s=30.0,
            temp_max_c=61.5,
            source="INA3221 (VDD_IN)",
            series=tuple((index / 10, 12.4 + math.sin(index / 9) + rng.random() * 0.4) for index in range(300)),
        ),
        energy_mj=397.4,
        throttle_events=(ThrottleEvent(what="oc2", count=3),),
        by_batch=(BatchPoint(batch=1, latency_ms=30.1, fps=33.2), BatchPoint(batch=4, latency_ms=88.0, fps=45.4)),
        layers=tuple(
            LayerTime(
                name=f"/model.{index}/conv/Conv",
                kind="Conv",
                time_us=3000 / (index + 1),
                flops=2e8 / (1 + index % 5),
                bytes=1e6 * (1 + index % 7),
            )
            for index in range(30)
        ),
        roof=Roof(flops_per_s=18.8e12, bytes_per_s=102e9, label="int8"),
        accuracy={"map50_95": 0.392, "images": 128, "data": "coco128"},
        budget=Budget(watts=15.0, fps=30.0),
    )
    return replace(record, **changes)


def predicted(title: str = "yolo11n predicted", **changes: Any) -> RunRecord:
    """What a planner says of another board."""
    record = RunRecord(
        status="predicted",
        title=title,
        origin="predict",
        device=Device(board="Jetson AGX Orin 64GB", mode="30W", mode_watts=30.0, versions={"predictor": "1"}),
        model="yolo11n",
        precision="int8",
        batch=1,
        fps=88.0,
        latency_ms=LatencyFigures(mean_ms=11.4, low_ms=9.0, high_ms=14.2),
        power=PowerFigures(mean_w=19.0, source="predicted from the board's coefficients"),
        energy_mj=216.0,
        memory_mib=310.0,
        limited_by="launch",
    )
    return replace(record, **changes)


def bare(title: str = "bare", **changes: Any) -> RunRecord:
    """A run about which nothing is known."""
    return replace(RunRecord(status="measured", title=title), **changes)
