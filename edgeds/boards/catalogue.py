"""The boards we know: the shipped table, and boards that a user wrote down in a file."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeds.boards.spec import BoardSpec, GpuArch
from edgeds.errors import SpecError
from edgeds.files import read_json
from edgeds.specs import from_json

DATA = Path(__file__).parent / "catalogue.json"


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All boards. ``sources`` resolves the short ids that the boards' facts carry."""

    boards: tuple[BoardSpec, ...]
    archs: Mapping[str, GpuArch]
    sources: Mapping[str, str]
    generated: str

    def find(self, name: str) -> BoardSpec | None:
        """The board of exactly this name."""
        return next((board for board in self.boards if board.name == name), None)

    def find_part(self, part_number: str, *, is_super: bool) -> BoardSpec | None:
        """The board of a module part number such as ``p3767-0005``; without a Super twin the standard one."""
        found = [board for board in self.boards if part_number in board.part_numbers]
        wanted = "super" if is_super else "standard"
        return next((board for board in found if board.profile == wanted), None)

    def source_text(self, source: str) -> str:
        """What a source id stands for; texts that are no id come back as they are."""
        return self.sources.get(source, source)


def load_catalogue(extra: Path | None = None) -> Catalogue:
    """The shipped boards plus the user's: those in ``extra``, else in ``config_file()`` where that exists.

    Raises SpecError, naming file and key, for a file that cannot be read or a board that does not make sense.
    """
    from edgeds.boards.userfile import read_user_boards

    shipped = _load_shipped()
    path = extra if extra is not None else config_file()
    if path is None or (extra is None and not path.exists()):
        return shipped
    own = read_user_boards(path, shipped)
    return Catalogue(
        boards=(*shipped.boards, *own), archs=shipped.archs, sources=shipped.sources, generated=shipped.generated
    )


def config_file() -> Path | None:
    """``$XDG_CONFIG_HOME/edgeds/boards.json``, else ``~/.config/edgeds/boards.json``; None without a home."""
    base = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(base) if base else Path.home() / ".config") / "edgeds" / "boards.json"
    except RuntimeError:  # no home directory, as in some containers: then there is no file of the user's
        return None


@functools.cache
def _load_shipped() -> Catalogue:
    data = read_json(DATA)
    if data.get("schema") != 1:
        raise SpecError(f"{DATA}: schema {data.get('schema')!r} is not 1; reinstall edgeds")
    archs = {
        name: from_json(GpuArch, {"name": name, **arch}, where=f"{DATA.name}: archs.{name}")
        for name, arch in data["archs"].items()
    }
    boards = tuple(_board(board, data["archs"]) for board in data["boards"])
    return Catalogue(boards=boards, archs=archs, sources=data["sources"], generated=data["generated"])


def _board(data: Mapping[str, Any], archs: Mapping[str, Any]) -> BoardSpec:
    arch = {"name": data["arch"], **archs[data["arch"]]}
    return from_json(BoardSpec, {**data, "arch": arch}, where=f"{DATA.name}: {data['name']}")
