"""Measure a model's ranges: ``python -m calibration.measure SET.json --data DIR --model MODEL --out FILE``.

Writes the range table that ``edgeds quantize --ranges`` reuses. Nothing but numbers is written: no weights, no images.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeds.compress.calibset import open_calibration
from edgeds.compress.curate import load_set, select_images
from edgeds.compress.quantize import DEFAULT_METHOD, DEFAULT_PERCENTILE, measure_ranges
from edgeds.compress.ranges import save_ranges
from edgeds.errors import EdgedsError, SpecError
from edgeds.graph.io import input_specs, load_model


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.measure", description=__doc__.splitlines()[0])
    parser.add_argument("set", type=Path, metavar="SET.json", help="set definition")
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="folder that holds the set's images")
    parser.add_argument("--model", required=True, type=Path, help="float ONNX model")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="range table to write (.json)")
    parser.add_argument(
        "--method",
        choices=("minmax", "percentile", "entropy", "mse"),
        default=DEFAULT_METHOD,
        help="default %(default)s",
    )
    parser.add_argument("--percentile", type=float, default=DEFAULT_PERCENTILE, metavar="P", help="default %(default)s")
    args = parser.parse_args(argv)
    try:
        definition = load_set(args.set)
        calibration = open_calibration(
            select_images(definition, args.data),
            model_inputs=input_specs(load_model(args.model)),
            preprocess=definition.preprocess,
            resolution=definition.size,
        )
        table = measure_ranges(args.model, calibration, method=args.method, percentile=args.percentile)
        save_ranges(table, args.out)
    except (EdgedsError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2 if isinstance(error, SpecError) else 1
    except KeyboardInterrupt:
        print("measure: interrupted, nothing was written", file=sys.stderr)
        return 130
    print(f"{args.out}: {len(table.tensors)} tensors over {table.samples} samples, set {table.key.set_sha256[:16]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
