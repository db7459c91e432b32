"""Collect calibration images from videos and folders: ``python -m calibration.collect SOURCE... --out DIR``.

Near-duplicate frames are left out, the kept ones are PNG files named by content, and ``set.json`` holds the counts and
a digest over the content. The folder appears when all is done, so an interrupted run leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from edgeds.compress.curate import collect_images
from edgeds.errors import EdgedsError, SpecError
from edgeds.pipelines.sources import Frame, FrameStream, open_sources
from edgeds.progress import track


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.collect", description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="video, image, folder, glob or stream address")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write, new or empty")
    parser.add_argument("--max", type=int, metavar="N", help="stop after N kept images")
    parser.add_argument("--every", type=float, default=0.0, metavar="S", help="seconds between video frames looked at")
    parser.add_argument(
        "--min-difference", type=int, default=6, metavar="D", help="bits of 64 by which images must differ (default 6)"
    )
    args = parser.parse_args(argv)
    try:
        if not 0 <= args.every < 1e6:
            raise SpecError(f"--every {args.every}: must be 0 or more seconds")
        with open_sources(args.sources) as frames, contextlib.closing(spaced(frames, args.every)) as chosen:
            shown = track(chosen, what="collecting", unit="frame")
            report = collect_images(shown, args.out, limit=args.max, min_difference=args.min_difference)
    except EdgedsError as error:
        print(f"collect: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpecError) else 1
    except KeyboardInterrupt:
        print("collect: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(
        f"{args.out}: kept {report.kept} of {report.read} images, {report.near_duplicates} near-duplicates, "
        f"{report.unreadable} unreadable, digest {report.digest[:16]}"
    )
    return 0


def spaced(frames: FrameStream, seconds: float) -> Iterator[Frame]:
    """Frames of each source at least ``seconds`` apart; images (which have no frame rate) all pass."""
    last: dict[str, float] = {}
    for frame in frames:
        if frame.fps is not None and seconds > 0:
            if frame.time_s - last.get(frame.source, float("-inf")) < seconds - 1e-6:
                continue
            last[frame.source] = frame.time_s
        yield frame


if __name__ == "__main__":
    sys.exit(main())
