"""Stop strings in text that arrives in pieces: nothing after one is let through, nor the beginning of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds the stop string that is complete first, wherever the pieces are cut.

    Text that may still become a stop string is held back until it can be told. Of two that are complete at the same
    character the longer one counts, so that none of it is let through.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Longest first, so that the first match at a character is the longest.
        self._stops = sorted(set(stops), key=lambda text: (-len(text), text))
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, *, enabled: bool = True) -> tuple[str, str | None]:
        """Text that can go out now, and the stop string that was completed, if any.

        After a stop string nothing may be pushed. With ``enabled`` False a complete stop string does not count.
        """
        if not self._stops:
            return text, None
        pending = self._held + text
        for offset, char in enumerate(text):
            found = self._advance(char)
            if found is not None and enabled:
                end = len(self._held) + offset + 1
                self._held = ""
                return pending[: end - len(found)], found
        keep = max(self._states)
        cut = len(pending) - keep
        self._held = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """What was held back; it did not become a stop string."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> str | None:
        """Move every matcher by one character; the longest stop string that ends here."""
        found = None
        for index, (stop, table) in enumerate(zip(self._stops, self._tables, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = table[state - 1]
            state += stop[state] == char
            if state == len(stop):
                found = found or stop
                state = table[state - 1]
            self._states[index] = state
        return found


def _failure_table(text: str) -> list[int]:
    """Per position, the length of the longest proper prefix of ``text`` that ends there (Knuth, Morris, Pratt 1977)."""
    table = [0] * len(text)
    state = 0
    for index in range(1, len(text)):
        while state and text[state] != text[index]:
            state = table[state - 1]
        state += text[state] == text[index]
        table[index] = state
    return table
