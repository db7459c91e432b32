"""Rows to the inputs that a graph declares, padded; nothing it does not declare is sent (report B96)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeds.engines.base import Array
from edgeds.errors import EngineMismatch
from edgeds.pipelines.bert.encode import Row
from edgeds.specs import TensorSpec

KNOWN_INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def check_inputs(specs: Sequence[TensorSpec]) -> int | None:
    """The only length the model takes, or None when it takes any.

    Raises EngineMismatch for a model without ``input_ids``, or with an input that no text gives.
    """
    names = [spec.name for spec in specs]
    if "input_ids" not in names:
        raise EngineMismatch(f"the model has no input 'input_ids', its inputs are {', '.join(names)}; not a text model")
    for spec in specs:
        if spec.name not in KNOWN_INPUTS:
            raise EngineMismatch(f"input {spec}: a text gives only {', '.join(KNOWN_INPUTS)}; export the model without")
        if len(spec.shape) != 2:
            raise EngineMismatch(f"input {spec}: expected two dimensions, batch and length")
        if spec.dtype not in ("int64", "int32", "float32", "float16", "bool"):
            raise EngineMismatch(f"input {spec}: expected whole numbers")
    lengths = {spec.shape[1] for spec in specs if isinstance(spec.shape[1], int)}
    if len(lengths) > 1:
        raise EngineMismatch(f"the inputs have different fixed lengths: {', '.join(map(str, specs))}")
    return lengths.pop() if lengths else None


def build_feeds(rows: Sequence[Row], specs: Sequence[TensorSpec], *, length: int, pad_id: int) -> dict[str, Array]:
    """One array [rows, length] per input of the model, of its own dtype, padded at the right."""
    values: dict[str, Array] = {
        "input_ids": np.full((len(rows), length), pad_id, np.int64),
        "attention_mask": np.zeros((len(rows), length), np.int64),
        "token_type_ids": np.zeros((len(rows), length), np.int64),
    }
    for at, row in enumerate(rows):
        count = len(row)
        values["input_ids"][at, :count] = row.ids
        values["attention_mask"][at, :count] = 1
        values["token_type_ids"][at, :count] = row.types
    return {spec.name: values[spec.name].astype(spec.np_dtype, copy=False) for spec in specs}
