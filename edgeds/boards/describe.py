"""Boards for people and for scripts: the table of all, the page of one, and the JSON of both."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from edgeds.boards.catalogue import Catalogue
from edgeds.boards.spec import BoardSpec, PowerMode, Target, peak_tops

WIDTH = 100


def board_json(target: Target, catalogue: Catalogue) -> dict[str, Any]:
    """One board with all facts; with a mode in the target, ``modes`` holds that one only.

    ``clocks``, ``bandwidth`` and ``memory`` hold the highest over the modes shown. ``sources`` maps ids to texts;
    the ids stand in ``fact_sources`` and in each mode's ``sources``. null: no source states it.
    """
    board = target.board
    modes = board.modes if target.mode is None else (target.mode,)
    used: dict[str, str] = {}

    def note_sources(sources: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        used.update({one: catalogue.source_text(one) for ids in sources.values() for one in ids})
        return {fact: list(ids) for fact, ids in sources.items()}

    return {
        "name": board.name,
        "title": board.title,
        "kind": board.kind,
        "profile": board.profile,
        "aliases": board.aliases,
        "part_numbers": board.part_numbers,
        "nvpmodel_conf": board.nvpmodel_conf,
        "valid_for": board.valid_for,
        "compute_capability": board.arch.compute_capability,
        "memory": {
            "size_gb": board.memory_gb,
            "usable_mib": board.usable_memory_mib,
            "type": board.memory_type,
            "bus_bits": board.bus_bits,
            "ecc": board.ecc,
        },
        "bandwidth": {"dram_gb_s": _highest(modes, "dram_gb_s"), "bus_bits": board.bus_bits},
        "clocks": {fact: _highest(modes, fact) for fact in ("gpu_mhz", "cpu_mhz", "emc_mhz")},
        "gpu": {"tpc": board.tpc, "sm": board.sm, "cuda_cores": _times(board.sm, board.arch.cuda_cores_per_sm)},
        "cpu": {"core": board.cpu_core, "cores": board.cpu_cores},
        "dla": {"cores": board.dla_cores},
        "power": {
            "range_w": board.power_range_w,
            "max_w": board.max_power_w,
            "rails": board.rails,
            "total_rails": board.total_rails,
        },
        "thermal": board.thermal,
        "advertised": board.advertised,
        "default_mode": board.default_mode.name if board.default_mode else None,
        "modes": [_mode_json(mode, board, note_sources(mode.sources)) for mode in modes],
        "notes": board.notes,
        "fact_sources": note_sources(board.sources),
        "arch": {
            "name": board.arch.name,
            "ops_per_sm_per_clock": board.arch.ops_per_sm_per_clock,
            "dla_ops_per_core_per_clock": board.arch.dla_ops_per_core_per_clock,
            "sources": note_sources(board.arch.sources),
        },
        "sources": used,
    }


def _mode_json(mode: PowerMode, board: BoardSpec, sources: dict[str, list[str]]) -> dict[str, Any]:
    return {
        "name": mode.name,
        "label": mode.label,
        "id": mode.id,
        "watts": mode.watts,
        "is_default": mode.is_default,
        "cpu_cores": mode.cpu_cores,
        "cpu_mhz": mode.cpu_mhz,
        "tpc": mode.tpc,
        "sm": mode.sm,
        "tpc_pg_mask": mode.tpc_pg_mask,
        "gpu_mhz": mode.gpu_mhz,
        "emc_mhz": mode.emc_mhz,
        "dram_gb_s": mode.dram_gb_s,
        "dla_cores": mode.dla_cores,
        "dla_mhz": mode.dla_mhz,
        "peak_int8_dense_tops": _rounded(peak_tops(board, mode, precision="int8")),
        "peak_fp16_dense_tflops": _rounded(peak_tops(board, mode, precision="fp16")),
        "peak_fp32_tflops": _rounded(peak_tops(board, mode, precision="fp32")),
        "sources": sources,
        "notes": mode.notes,
    }


def table_lines(catalogue: Catalogue) -> list[str]:
    """All boards, one line each, within 80 columns."""
    rows = [("NAME", "GB", "SM", "DLA", "GPU MHZ", "GB/S", "MODES (* boot)")]
    for board in catalogue.boards:
        modes = " ".join(f"{mode.label}{'*' if mode.is_default else ''}" for mode in board.modes)
        row = (board.name, _text(board.memory_gb), _text(board.sm), _text(board.dla_cores))
        rows.append((*row, _text(board.highest("gpu_mhz")), _text(board.highest("dram_gb_s")), modes or "-"))
    return _columns(rows, right={1, 2, 3, 4, 5})


def page_lines(target: Target, catalogue: Catalogue) -> list[str]:
    """One board: facts, its modes as a table, notes, and all sources with their numbers."""
    board = target.board
    modes = board.modes if target.mode is None else (target.mode,)
    numbers: dict[str, int] = {}

    def refs(ids: Sequence[str]) -> str:
        found = sorted(numbers.setdefault(one, len(numbers) + 1) for one in ids)
        return f" [{', '.join(map(str, found))}]" if found else ""

    def of_board(fact: str) -> str:
        return refs(board.sources.get(fact, ()))

    lines = [f"{board.title} ({board.name})"]
    facts = [
        ("also called", ", ".join((*board.aliases, *board.part_numbers)) or "-", of_board("part_numbers")),
        ("GPU", f"compute capability {board.arch.compute_capability}, {_text(board.sm)} SM", of_board("sm")),
        ("memory", f"{_text(board.memory_gb)} GB, {_text(board.bus_bits)} bit", of_board("memory_gb")),
        ("usable memory", f"{_text(board.usable_memory_mib)} MiB", of_board("usable_memory_mib")),
        ("CPU", f"{_text(board.cpu_cores)} x {board.cpu_core or 'unknown'}", of_board("cpu_cores")),
        ("DLA cores", _text(board.dla_cores), of_board("dla_cores")),
        ("power range", _range(board.power_range_w), of_board("power_range_w")),
        ("module power", " + ".join(board.total_rails or ()) or "no rule is known", of_board("total_rails")),
        ("valid for", board.valid_for or "-", ""),
    ]
    lines += [f"  {name:<14}{text}{source}" for name, text, source in facts]
    rows: list[Sequence[str]] = [
        ("MODE", "ID", "W", "CPU", "CPU MHZ", "SM", "GPU MHZ", "EMC MHZ", "GB/S", "DLA MHZ", "INT8 TOPS", "SOURCES")
    ]
    for mode in modes:
        ids = list(dict.fromkeys(one for values in mode.sources.values() for one in values))
        rows.append(
            (
                f"{mode.label}{'*' if mode.is_default else ''}",
                _text(mode.id),
                "-" if mode.watts is None else _text(mode.watts),
                *map(_text, (mode.cpu_cores, mode.cpu_mhz, mode.sm, mode.gpu_mhz, mode.emc_mhz)),
                _text(mode.dram_gb_s),
                "/".join(map(_text, mode.dla_mhz)) or "-",
                _text(_rounded(peak_tops(board, mode, precision="int8"))),
                refs(ids).strip(" []"),
            )
        )
    lines += [
        "",
        *_columns(rows, right=set(range(1, 11))),
        "  * the mode it boots in; ? no source states it; W is the number in the name, no enforced limit",
    ]
    notes = {f"{name}": text for name, text in board.notes.items()}
    notes |= {f"{mode.label} {name}": text for mode in modes for name, text in mode.notes.items()}
    lines += ["", "notes:"] if notes else []
    for name, text in notes.items():
        for one, number in sorted(numbers.items(), key=lambda item: -len(item[0])):
            text = text.replace(f"[{one}]", f"[{number}]")
        lines += _wrap(f"{name}: {_expand(text, catalogue)}", indent="  ")
    lines += ["", "sources:"] if numbers else []
    for one, number in numbers.items():
        lines += _wrap(f"[{number}] {catalogue.source_text(one)}", indent="  ")
    return lines


def _expand(text: str, catalogue: Catalogue) -> str:
    """Ids in notes stand in brackets; those that the page does not number are left out."""
    for one in catalogue.sources:
        text = text.replace(f"[{one}, ", "[").replace(f", {one}]", "]").replace(f" [{one}]", "")
    return text


def _columns(rows: Sequence[Sequence[str]], *, right: set[int]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _wrap(text: str, *, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _text(value: float | None) -> str:
    return "?" if value is None else f"{value:g}" if value < 100_000 else str(int(value))


def _range(value: tuple[float, float] | None) -> str:
    return "unknown" if value is None else f"{value[0]:g} to {value[1]:g} W"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _times(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a * b


def _highest(modes: Sequence[PowerMode], fact: str) -> float | None:
    return max((value for mode in modes if (value := getattr(mode, fact)) is not None), default=None)
