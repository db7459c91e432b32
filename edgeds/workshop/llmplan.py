"""What a language model's bundle says about its board: predicted time to the first token and rate of decoding."""

from __future__ import annotations

import json
import logging
from typing import Any

from edgeds.boards.cost_file import parse_cost
from edgeds.boards.decoder import predict_llm
from edgeds.boards.spec import Target
from edgeds.errors import SpecError
from edgeds.workshop.planning import PlannedParts

PROMPT_TOKENS, CONTEXT_TOKENS = 128, 512
PRECISIONS = {"float": "fp16", "int8": "int8", "int4": "int4"}
log = logging.getLogger("edgeds.workshop")


def plan_language_model(target: Target | None, *, cost: bytes, weights: str, kv: str) -> PlannedParts:
    """Predicted figures for a prompt of 128 tokens and a cache of 512, in the board's mode; nothing without a target.

    A board that cannot be predicted for is named, with a warning: the bundle is worth keeping.
    """
    if target is None:
        return PlannedParts()
    named = {"name": target.board.name, **({"mode": target.mode.label} if target.mode is not None else {})}
    try:
        if target.mode is None:
            raise SpecError(f"{target.board.name}: give a power mode, as {target.board.name}@15W")
        found = predict_llm(
            parse_cost(json.loads(cost), where="cost.json"),
            board=target.board,
            mode=target.mode,
            precision=PRECISIONS[weights],
            prompt=PROMPT_TOKENS,
            context=CONTEXT_TOKENS,
            kv_precision="int8" if kv == "int8" else "fp16",
        )
    except SpecError as error:
        log.warning("not predicted: %s", error)
        return PlannedParts(target=named)
    predicted: dict[str, Any] = {
        "label": "predicted",
        "precision": PRECISIONS[weights],
        "prompt_tokens": found.prompt_tokens,
        "context_tokens": found.context_tokens,
        "ttft_ms": found.ttft_ms,
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_low": found.tokens_per_s_low,
        "tokens_per_s_high": found.tokens_per_s_high,
        "power_w": found.decode.power_w,
        "memory_mib": found.decode.memory_mib,
        "kv_bytes_per_token": found.kv_bytes_per_token,
    }
    return PlannedParts(target=named, predicted=predicted)
