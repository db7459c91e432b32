"""``edgeds run``: a detector on images, videos and cameras."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections import Counter

from edgeds.cli.detector import add_detector_arguments, open_detector
from edgeds.cli.options import add_trust, given_path
from edgeds.cli.output import emit_line, emit_text
from edgeds.cli.saving import ResultWriter
from edgeds.errors import SpecError
from edgeds.pipelines.sources import Frame, open_sources
from edgeds.pipelines.yolo import Result

SUMMARY = "Run a bundle (or a plain YOLO .onnx) on images, folders, videos, cameras and network streams."

EXAMPLES = """\
examples:
  edgeds run yolo.bundle street.jpg --save out/           draw boxes on one picture
  edgeds run yolo.bundle images/ --json > found.jsonl     one JSON line per picture
  edgeds run yolo.bundle 0 rtsp://camera/stream           a camera and a stream, newest frames only
  edgeds run yolo11n.onnx video.mp4 --conf 0.4 --save out/
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_detector_arguments(parser)
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="image, folder, glob, video, .txt list, camera number, rtsp:// or http:// address, GStreamer pipeline",
    )
    parser.add_argument("--save", type=given_path, metavar="DIR", help="write annotated pictures and videos here")
    parser.add_argument("--conf", type=float, default=0.25, metavar="X", help="lowest score (default %(default)s)")
    parser.add_argument(
        "--iou",
        type=float,
        default=0.7,
        metavar="X",
        help="overlap above which the weaker box goes (default %(default)s)",
    )
    parser.add_argument(
        "--max-det", type=int, default=300, metavar="N", help="detections per image (default %(default)s)"
    )
    parser.add_argument("--agnostic", action="store_true", help="boxes of different classes suppress each other too")
    parser.add_argument(
        "--policy",
        choices=("auto", "every", "latest"),
        default="auto",
        help="every: no frame is lost; latest: only the newest; auto: latest for live sources (default)",
    )
    parser.add_argument("--frames", type=int, metavar="N", help="stop after N frames in all")
    parser.add_argument("--json", action="store_true", help="print one JSON line per frame")
    parser.add_argument(
        "--stats", type=given_path, metavar="FILE", help="write FPS and queue there, for edgeds monitor"
    )
    add_trust(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when not one frame could be read."""
    from edgeds.runtime.livestats import publish_stats

    if args.frames is not None and args.frames < 1:
        raise SpecError(f"--frames {args.frames}: must be at least 1")
    thresholds = {"conf": args.conf, "iou": args.iou, "max_det": args.max_det, "agnostic": args.agnostic}
    done = failed = 0
    with contextlib.ExitStack() as stack:
        # Sources first: a wrong path should not cost the time of loading a model.
        stream = stack.enter_context(open_sources(args.sources, policy=args.policy))
        writer = stack.enter_context(ResultWriter(args.save)) if args.save else None
        pipeline = stack.enter_context(open_detector(args, **thresholds))
        stack.enter_context(publish_stats(pipeline.session, args.stats))
        start = time.perf_counter()
        pairs = stack.enter_context(contextlib.closing(pipeline.stream(_First(stream, args.frames))))
        for frame, result in pairs:
            done += 1
            failed += not result.ok
            if args.json:
                emit_line(line_of(frame, result))
            elif result.ok:
                emit_text(text_of(frame, result))
            if writer is not None and result.ok:
                writer.write(frame, result)
        seconds = time.perf_counter() - start
        if not args.json and not args.quiet:
            lost = f", {failed} unreadable" if failed else ""
            lost += f", {stream.dropped} passed over" if stream.dropped else ""
            rate = (done - failed) / seconds if seconds > 0 else 0.0
            frames = f"{done} {'frame' if done == 1 else 'frames'}{lost}"
            emit_text(f"{frames}, {rate:.1f} FPS on {pipeline.session.engine.backend}")
    return 0 if done > failed else 1


def line_of(frame: Frame, result: Result) -> dict[str, object]:
    """The JSON line of one frame: source, frame, detections and what else the task has."""
    plain = result.to_json()
    return {"source": frame.source, "frame": frame.index, **{k: v for k, v in plain.items() if k != "source"}}


def text_of(frame: Frame, result: Result) -> str:
    """One line for people: what was found."""
    place = frame.source if frame.fps is None else f"{frame.source} frame {frame.index}"
    if result.probs is not None:
        found = ", ".join(f"{label} {share:.2f}" for _, label, share in result.top_classes(3))
    else:
        counts = Counter(result.label(index) for index in range(len(result)))
        found = ", ".join(f"{count} {label}" for label, count in counts.most_common()) or "nothing"
    return f"{place}: {found}"


class _First:
    """At most ``count`` frames of a stream, still seen as one by the pipeline."""

    yields_frames = True

    def __init__(self, stream: object, count: int | None) -> None:
        self._frames = itertools.islice(stream, count)  # type: ignore[call-overload]
        self.live_count = getattr(stream, "live_count", 0)

    def __iter__(self) -> _First:
        return self

    def __next__(self) -> Frame:
        frame: Frame = next(self._frames)
        return frame

    def close(self) -> None:
        """The stream belongs to its opener."""
