"""YOLO of every family: detection, segmentation, pose, oriented boxes, classification."""

from edgeds.pipelines.yolo.decode import decode
from edgeds.pipelines.yolo.layout import FAMILIES, HeadLayout, choose_layout, layout_to_json
from edgeds.pipelines.yolo.metadata import YoloMetadata, parse_metadata, parse_names
from edgeds.pipelines.yolo.options import DetectOptions, default_buckets, default_preprocess
from edgeds.pipelines.yolo.pipeline import YoloPipeline
from edgeds.pipelines.yolo.result import Result
from edgeds.pipelines.yolo.suppress import nms

__all__ = [
    "FAMILIES",
    "DetectOptions",
    "HeadLayout",
    "Result",
    "YoloMetadata",
    "YoloPipeline",
    "choose_layout",
    "decode",
    "default_buckets",
    "default_preprocess",
    "layout_to_json",
    "nms",
    "parse_metadata",
    "parse_names",
]
