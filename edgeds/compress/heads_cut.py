"""Choose which heads and feed-forward units stay, remove the others, and correct the counts that metadata states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from onnx import ModelProto

from edgeds.compress.channels import PruneResult, prune_channels
from edgeds.compress.choose import Kept, Scores, choose_units
from edgeds.compress.groups import Groups
from edgeds.compress.heads_find import Blocks, only

MOST = 0.75
"""Share of one block that may go when losses of blocks are compared with each other."""
_HEAD_KEYS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
_KEY_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads", "kv_num_heads", "n_head_kv")
_WIDTH_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim")
_LAYER_KEYS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@dataclass(frozen=True, kw_only=True)
class Width:
    """Heads of an attention, or the width of a feed-forward layer, before and after; ``node`` names it."""

    node: str
    before: int
    after: int


@dataclass(frozen=True, kw_only=True)
class CutResult:
    """The smaller model with its mapping, and the sizes of each block."""

    result: PruneResult
    heads: tuple[Width, ...]
    key_heads: tuple[Width, ...]
    ffn: tuple[Width, ...]


def choose_blocks(
    groups: Groups,
    blocks: Blocks,
    scores: Scores,
    *,
    heads: float,
    ffn: float,
    scope: str = "global",
    multiple: int | None = None,
    min_channels: int = 1,
    by_loss: bool = False,
) -> Kept:
    """Group -> units that stay. Heads and feed-forward units are ranked apart, each over all layers ("global") or
    within each ("uniform"); every block keeps at least one. ``multiple`` is for feed-forward widths."""
    kept: Kept = {}
    sides = (
        ({block.group for block in blocks.attention}, heads, 1),
        ({block.group for block in blocks.ffn}, ffn, multiple),
    )
    for indices, ratio, step in sides:
        kept |= choose_units(
            only(groups, indices),
            scores,
            ratio=ratio,
            scope=scope,
            multiple=step,
            min_channels=min_channels,
            max_share=MOST if by_loss else None,
        )
    return kept


def cut_blocks(model: ModelProto, groups: Groups, blocks: Blocks, kept: Kept) -> CutResult:
    """Remove all but ``kept``: rows and columns of weights, biases, sizes of Reshapes, counts in attributes. Scales
    such as 1 / sqrt(d) stay, since heads keep their size. Raises what ``prune_channels`` raises."""
    result = prune_channels(model, kept, groups=groups)
    heads, key_heads = [], []
    for block in blocks.attention:
        left = len(kept[block.group]) if block.group in kept else block.units
        per_unit = block.heads // block.units
        heads.append(Width(node=block.node, before=block.heads, after=left * per_unit))
        key_heads.append(Width(node=block.node, before=block.units, after=left))
    ffn = [
        Width(
            node=block.layers[0],
            before=block.width,
            after=len(kept[block.group]) if block.group in kept else block.width,
        )
        for block in blocks.ffn
    ]
    return CutResult(result=result, heads=tuple(heads), key_heads=tuple(key_heads), ffn=tuple(ffn))


def correct_metadata(
    model: ModelProto,
    *,
    heads: tuple[Width, ...] = (),
    key_heads: tuple[Width, ...] = (),
    ffn: tuple[Width, ...] = (),
    layers: tuple[int, int] | None = None,
) -> tuple[str, ...]:
    """Rewrite counts in the metadata, in place, where they state what was true before; return the keys changed.

    One number where all layers agree, else a JSON list with one per layer. ``layers``: how many before and after.
    Keys may have a prefix, as in ``edgeds.num_heads``.
    """
    counts: list[tuple[tuple[str, ...], Mapping[str, str]]] = [
        (_HEAD_KEYS, _change(heads)),
        (_KEY_HEAD_KEYS, _change(key_heads)),
        (_WIDTH_KEYS, _change(ffn)),
        (_LAYER_KEYS, {} if layers is None else {str(layers[0]): str(layers[1])}),
    ]
    changed = []
    for entry in model.metadata_props:
        for keys, change in counts:
            if entry.key.rpartition(".")[2] in keys and entry.value.strip() in change:
                entry.value = change[entry.value.strip()]
                changed.append(entry.key)
                break
    return tuple(changed)


def _change(widths: tuple[Width, ...]) -> dict[str, str]:
    """What a stated count becomes: empty when nothing changed or layers differed already."""
    before, after = {item.before for item in widths}, [item.after for item in widths]
    if len(before) != 1 or all(item.before == item.after for item in widths):
        return {}
    return {str(before.pop()): str(after[0]) if len(set(after)) == 1 else json.dumps(after)}
