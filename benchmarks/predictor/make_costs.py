"""Write ``costs/NAME.json`` from the definitions here, and compare the totals with public figures.

    python -m benchmarks.predictor.make_costs [--check]

``--check`` only prints parameters (millions) and GFLOPs, beside the public ones where we know them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.predictor import detectors, detectors_more, mobile, networks
from benchmarks.predictor.layers import Sketch
from edgeds.files import write_text

COSTS = Path(__file__).parent / "costs"
IMAGE = "images"

# Millions of parameters and GFLOPs (2 x multiply-adds) of the public model cards.
PUBLIC = {
    "yolov8n": (3.2, 8.7), "yolov8s": (11.2, 28.6), "yolov8m": (25.9, 78.9), "yolov8l": (43.7, 165.2),
    "yolov8x": (68.2, 257.8), "yolo11n": (2.6, 6.5), "yolo11s": (9.4, 21.5), "yolo11m": (20.1, 68.0),
    "yolo11l": (25.3, 86.9), "yolo11x": (56.9, 194.9), "yolox-s": (9.0, 26.8), "yolox-m": (25.3, 73.8),
    "yolox-l": (54.2, 155.6), "yolov5s": (7.2, 16.5), "resnet18": (11.7, 3.64), "resnet34": (21.8, 7.34),
    "resnet50": (25.6, 8.2), "ssd-resnet34": (20, 433), "vit-b16": (86.6, 35.1), "vit-b32": (88.2, 8.8),
    "yolov7": (36.9, 104.7), "yolov7-tiny": (6.2, 13.8), "yolov9t": (2.0, 7.7), "yolov9s": (7.1, 26.4),
    "yolov9m": (20.0, 76.3), "yolov10n": (2.3, 6.7), "yolov10s": (7.2, 21.6), "yolov10m": (15.4, 59.1),
    "yolo26n": (2.4, 5.4), "yolo26s": (9.5, 20.7), "yolo26m": (20.4, 68.2), "yolo26l": (24.8, 86.4),
    "yolo26x": (55.7, 193.9), "mobilenet-v2": (3.5, 0.6), "mobilenet-v3": (5.5, 0.44), "efficientnet-b0": (5.3, 0.78),
    "efficientnet-b1": (7.8, 1.4), "efficientnet-b2": (9.1, 2.0), "efficientnet-b3": (12.2, 3.6),
    "ssd-mobilenet-v1": (6.9, 2.47), "retinanet": (34.0, 303), "resnet152": (60.2, 23.0),
}  # fmt: skip


def recipes() -> dict[str, tuple[Callable[[Sketch], None], tuple[int, ...], str]]:
    """Name -> what draws it, the input's shape, a note."""
    made: dict[str, tuple[Callable[[Sketch], None], tuple[int, ...], str]] = {}
    square = (1, 3, 640, 640)
    for size in "nsmlx":
        made[f"yolov8{size}"] = (partial(detectors.yolov8, size=size), square, "from the definition")
        made[f"yolo11{size}"] = (partial(detectors.yolo11, size=size), square, "from the definition")
    for size in detectors.SCALES_X:
        made[f"yolox-{size}"] = (partial(detectors.yolox, size=size), square, "from the definition")
    made["yolov5s"] = (detectors.yolov5s, square, "from the definition")
    for depth in (18, 34, 50, 152):
        made[f"resnet{depth}"] = (partial(networks.resnet, depth=depth), (1, 3, 224, 224), "from the definition")
    made["ssd-resnet34"] = (networks.ssd_resnet34, (1, 3, 1200, 1200), "from the definition")
    for patch in (16, 32):
        made[f"vit-b{patch}"] = (partial(networks.vit_b, patch=patch), (1, 3, 224, 224), "from the definition")
    bert = partial(networks.encoder, tokens=384, width=1024, layers=24, heads=16, inner=4096)
    made["bert-large"] = (bert, (1, 384), "from the definition; embeddings left out")
    more = detectors_more
    for size in "nsmlx":
        made[f"yolo26{size}"] = (partial(more.yolo26, size=size), square, "from the layout of YOLO11, one bin per side")
    for size in more.V10_SCALES:
        made[f"yolov10{size}"] = (partial(more.yolov10, size=size), square, "from the definition")
    for size in more.V9_SIZES:
        made[f"yolov9{size}"] = (partial(more.yolov9, size=size), square, "from the definition")
    made["yolov7"] = (more.yolov7, square, "from the definition")
    made["yolov7-tiny"] = (more.yolov7_tiny, square, "from the definition")
    made["retinanet"] = (more.retinanet_resnet50, (1, 3, 800, 800), "ResNet-50, COCO classes")
    made["retinanet-resnext50"] = (more.retinanet_resnext50, (1, 3, 800, 800), "MLPerf: ResNeXt-50, 264 classes")
    made["ssd-mobilenet-v1"] = (more.ssd_mobilenet_v1, (1, 3, 300, 300), "from the definition")
    for size, (px, *_) in more.RF_DETR.items():
        made[f"rf-detr-{size}"] = (partial(more.rf_detr, size=size), (1, 3, px, px), "from the description")
    made["mobilenet-v2"] = (mobile.mobilenet_v2, (1, 3, 224, 224), "from the definition")
    made["mobilenet-v3"] = (mobile.mobilenet_v3, (1, 3, 224, 224), "large, from the definition")
    for size, (*_, px) in mobile.EFFICIENTNET_SIZES.items():
        made[f"efficientnet-{size}"] = (partial(mobile.efficientnet, size=size), (1, 3, px, px), "from the definition")
    made["3d-unet"] = (mobile.unet3d, (1, 1, 128, 128, 128), "one window of 128 voxels a side")
    for name in networks.DECODERS:
        made[name] = (partial(networks.decoder, name=name), (1, 1), "one decoded token, 256 tokens in the cache")
    return made


def draw(name: str) -> dict[str, Any]:
    """The cost document of one model."""
    paint, shape, note = recipes()[name]
    sketch = Sketch(smooth=name.startswith(("yolo", "efficientnet")) and name != "yolov7-tiny")
    paint(sketch)
    return sketch.document(IMAGE if len(shape) == 4 else "input_ids", shape, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    for name in recipes():
        document = draw(name)
        params = sum(layer["params"] for layer in document["layers"]) / 1e6
        gflops = sum(layer["flops"] for layer in document["layers"]) / 1e9
        print(f"{name:14} {params:9.2f} M {gflops:8.2f} GFLOP   public {PUBLIC.get(name, ('', ''))}")
        if not check:
            rows = ",\n".join(json.dumps(layer, separators=(",", ":")) for layer in document["layers"])
            head = json.dumps(document["inputs"])
            write_text(
                COSTS / f"{name}.json",
                f'{{"inputs": {head}, "notes": {json.dumps(document["notes"])}, "layers": [\n{rows}\n]}}\n',
            )


if __name__ == "__main__":
    main()
