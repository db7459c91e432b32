"""What people type for a board and a mode, read into a Target; unknown names list the nearest."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from edgeds.boards.catalogue import Catalogue, load_catalogue
from edgeds.boards.spec import BoardSpec, GpuArch, PowerMode, Target
from edgeds.errors import SpecError

THIS_BOARD = ("jetson", "this", "local", "here")
MAX_NAME = 200


def resolve_target(text: str, *, catalogue: Catalogue | None = None, root: Path = Path("/")) -> Target:
    """Read ``BOARD`` or ``BOARD@MODE``.

    Case, spaces and underscores do not matter; boards answer to names, aliases and part numbers; modes to their
    name (``MODE_30W``), label (``30W``), number of watts (``30``), or ``MAXN`` for the one MAXN mode. A mode that only
    the Super profile of the same module has picks that profile. ``jetson`` is the machine under ``root``, and without
    a mode given in the mode it is in. ``sm86`` or ``rtx-sm86`` is a discrete GPU known by its compute capability only.
    Raises SpecError with the nearest names.
    """
    catalogue = catalogue or load_catalogue()
    name, at, mode_text = text.partition("@")
    if not name.strip() or len(text) > MAX_NAME or (at and not mode_text.strip()):
        raise SpecError(f"target {text[:MAX_NAME]!r}: expected BOARD or BOARD@MODE, as in orin-nx-16gb@15W")
    if normalize_name(name) in THIS_BOARD:
        return _this_board(mode_text, catalogue=catalogue, root=root)
    board = find_board(name, catalogue)
    if not mode_text:
        return Target(board=board)
    mode = find_mode(mode_text, board.modes)
    twin = catalogue.find(f"{board.name}-super")
    if mode is None and twin is not None:
        # 25W of an Orin Nano 8GB exists in the Super profile only; the Target's name shows the choice.
        exact = [one for one in twin.modes if _key(one.label) == _key(mode_text)]
        if exact:
            return Target(board=twin, mode=exact[0])
    if mode is None:
        raise SpecError(_unknown_mode(mode_text, board, twin))
    return Target(board=board, mode=mode)


def find_board(name: str, catalogue: Catalogue) -> BoardSpec:
    """The board that ``name`` means. Raises SpecError with the nearest names."""
    wanted = normalize_name(name)
    for board in catalogue.boards:
        if wanted == board.name or _key(wanted) in {_key(known) for known in board_names(board)}:
            return board
    capability = re.fullmatch(r"(?:rtx-?)?sm-?(\d{2,3})", wanted)
    if capability is not None:
        return bare_gpu(capability.group(1), catalogue)
    known = [candidate for board in catalogue.boards for candidate in board_names(board)]
    near = difflib.get_close_matches(wanted, known, n=6, cutoff=0.4)
    inside = [board.name for board in catalogue.boards if wanted in board.name]
    owners = [next(board.name for board in catalogue.boards if hit in board_names(board)) for hit in near]
    names = list(dict.fromkeys([*inside, *owners]))[:4] or [board.name for board in catalogue.boards]
    raise SpecError(f"target {name.strip()!r} is not known; nearest: {', '.join(names)} (all: edgeds targets)")


def board_names(board: BoardSpec) -> tuple[str, ...]:
    """Everything that a board answers to, normalised."""
    suffix = "-super" if board.profile == "super" else ""
    parts = [f"{part}{suffix}" for part in board.part_numbers]
    return (board.name, *board.aliases, normalize_name(board.title), *parts)


def normalize_name(name: str) -> str:
    """Lower case, hyphens, without maker and family: ``NVIDIA Jetson Orin NX 16 GB`` is ``orin-nx-16gb``."""
    text = re.sub(r"[\s_\-/]+", "-", name.strip().lower()).strip("-")
    text = re.sub(r"-?developer-kit", "-devkit", text)
    text = re.sub(r"(\d)-gb\b", r"\1gb", text)
    return re.sub(r"^(?:nvidia-)?(?:jetson-(?=.))?", "", text)


def find_mode(text: str, modes: Iterable[PowerMode]) -> PowerMode | None:
    """The mode that ``text`` means, or None when none or several fit."""
    modes = tuple(modes)
    wanted = _key(text)
    exact = [mode for mode in modes if wanted in (_key(mode.name), _key(mode.label))]
    if exact:
        return exact[0]
    if wanted == "maxn":
        loose = [mode for mode in modes if _key(mode.name).startswith("maxn")]
    else:
        watts = re.fullmatch(r"(\d+(?:\.\d+)?)w?", wanted)
        loose = [mode for mode in modes if watts is not None and mode.watts == float(watts.group(1))]
    return loose[0] if len(loose) == 1 else None


def bare_gpu(capability: str, catalogue: Catalogue) -> BoardSpec:
    """A discrete GPU of which only the compute capability is known: ``86`` is 8.6."""
    dotted = f"{capability[:-1]}.{capability[-1]}"
    known = next((arch for arch in catalogue.archs.values() if arch.compute_capability == dotted), None)
    return BoardSpec(
        name=f"rtx-sm{capability}",
        title=f"NVIDIA GPU of compute capability {dotted}",
        kind="discrete",
        arch=known or GpuArch(name=f"sm_{capability}", compute_capability=dotted),
        notes={"modes": "only the compute capability is known; measure on the machine or describe it with --boards"},
    )


def _this_board(mode_text: str, *, catalogue: Catalogue, root: Path) -> Target:
    from edgeds.boards.probe import probe_machine

    probe = probe_machine(root=root, catalogue=catalogue)
    if probe.board is None:
        raise SpecError(
            "target 'jetson' means this machine, which is no Jetson and has no NVIDIA GPU that answers; "
            "name a board instead (edgeds targets lists them)"
        )
    if not mode_text:
        return Target(board=probe.board, mode=probe.current_mode)
    mode = find_mode(mode_text, probe.board.modes)
    if mode is None:
        raise SpecError(_unknown_mode(mode_text, probe.board, None))
    return Target(board=probe.board, mode=mode)


def _unknown_mode(text: str, board: BoardSpec, twin: BoardSpec | None) -> str:
    modes = ", ".join(mode.label for mode in board.modes) or "none is known"
    also = f"; {twin.name} has {', '.join(mode.label for mode in twin.modes)}" if twin is not None else ""
    return f"target {board.name}: it has no power mode {text.strip()!r} (or several fit); its modes: {modes}{also}"


def _key(text: str) -> str:
    return re.sub(r"[\s_\-]+", "", text.strip().lower()).removeprefix("mode")
