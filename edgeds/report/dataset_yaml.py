"""The small part of YAML that YOLO data files use: ``key: value``, lists and a map of names. Nothing else is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from edgeds.errors import SpecError
from edgeds.files import read_regular

MAX_BYTES = 4 << 20
_KEYS = ("path", "train", "val", "test", "names", "nc", "kpt_shape")


def read_data_yaml(path: Path) -> dict[str, Any]:
    """The keys path, train, val, test (text), names (dict or list), nc (int), kpt_shape (list); others are skipped.

    Raises SpecError with file and line for a value that is not understood.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: more than {MAX_BYTES >> 20} MiB is not a data file")
        lines = read_regular(path).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    out: dict[str, Any] = {}
    at = 0
    while at < len(lines):
        line = _strip_comment(lines[at])
        match = re.match(r"([A-Za-z_][\w-]*)\s*:(?:\s+(.*))?$", line)
        at += 1
        if match is None or match.group(1) not in _KEYS:
            continue
        key, text = match.group(1), (match.group(2) or "").strip()
        start = at
        block = []
        while at < len(lines) and (not _strip_comment(lines[at]).strip() or re.match(r"\s+\S|-\s", lines[at])):
            block.append(_strip_comment(lines[at]).strip())
            at += 1
        where = f"{path}:{start}"
        out[key] = _flow(text, block, where=where) if text else _block(block, where=where)
    if "nc" in out:
        if not str(out["nc"]).isdigit():
            raise SpecError(f"{path}: nc must be a whole number, got {out['nc']!r}")
        out["nc"] = int(out["nc"])
    return out


def _strip_comment(line: str) -> str:
    """The line without a comment; a ``#`` inside quotes, or glued to a word, is not one."""
    quote = ""
    for index, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (index == 0 or line[index - 1] in " [{,:\t"):
            quote = letter
        elif letter == "#" and (index == 0 or line[index - 1] in " \t"):
            return line[:index].rstrip()
    return line.rstrip()


def _block(lines: list[str], *, where: str) -> Any:
    """An indented map ``0: person`` or list ``- person``."""
    rows = [line for line in lines if line]
    if all(row.startswith("- ") or row == "-" for row in rows):
        return [_scalar(row[1:].strip()) for row in rows]
    pairs = [re.match(r"('[^']*'|\"[^\"]*\"|[^:]+?)\s*:\s+(.*)$", row) for row in rows]
    if all(pairs):
        return {_scalar(pair.group(1)): _scalar(pair.group(2)) for pair in pairs if pair is not None}
    raise SpecError(f"{where}: expected lines like '0: person' or '- person'")


def _flow(text: str, more: list[str], *, where: str) -> Any:
    """A value on the key's line: text, or ``[a, b]`` / ``{0: a}``, which may go on over the next lines."""
    if text[0] not in "[{":
        return _scalar(text)
    text = " ".join([text, *more]).strip()
    if text[-1] != {"[": "]", "{": "}"}[text[0]]:
        raise SpecError(f"{where}: {text[0]!r} is not closed")
    items = [item.strip() for item in re.findall(r"(?:'(?:[^']|'')*'|\"[^\"]*\"|[^,'\"]|(?<=\w)')+", text[1:-1])]
    items = [item for item in items if item]
    if text[0] == "[":
        return [_scalar(item) for item in items]
    pairs = [item.partition(":") for item in items]
    if not all(colon for _, colon, _ in pairs):
        raise SpecError(f"{where}: expected {{0: name, 1: name}}, got {text[:60]!r}")
    return {_scalar(key.strip()): _scalar(value.strip()) for key, _, value in pairs}


def _scalar(text: str) -> str:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("''", "'") if text[0] == "'" else text[1:-1]
    return text
