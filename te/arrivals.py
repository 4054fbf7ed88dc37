# SPDX-License-Identifier: Apache-2.0
"""Tags: who may write, and how many transfers have landed."""

from __future__ import annotations

import threading

__all__ = ["TAG_LIMIT", "Arrivals", "Tag", "check_tag"]

TAG_LIMIT = 1 << 64


class Tag:
    """One opening of a tag value.

    A transfer keeps the opening it began under, so a value opened again is not open to it.
    """

    __slots__ = ("count", "open", "value")

    def __init__(self, value: int) -> None:
        self.value = value
        self.open = True
        self.count = 0


class Arrivals:
    """The open tags of an engine. Any thread may call anything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tags: dict[int, Tag] = {}

    def expect(self, value: int) -> None:
        """Opens a tag; ``ValueError`` when it is open already."""
        check_tag(value)
        with self._lock:
            if value in self._tags:
                raise ValueError(f"tag {value:#x} is open already")
            self._tags[value] = Tag(value)

    def find(self, value: int) -> Tag | None:
        """The opening that a transfer with this tag would begin under now."""
        return self._tags.get(value)

    def landed(self, tag: Tag) -> bool:
        """Counts a transfer that has landed; False when the tag was closed meanwhile."""
        with self._lock:
            tag.count += tag.open
            return tag.open

    def count(self, value: int) -> int:
        """Transfers that have landed under the open tag; 0 when it is not open."""
        tag = self._tags.get(value)
        return 0 if tag is None else tag.count

    def close(self, value: int) -> int:
        """Closes a tag and returns its count; 0 when it was not open."""
        check_tag(value)
        with self._lock:
            tag = self._tags.pop(value, None)
            if tag is None:
                return 0
            tag.open = False
            return tag.count


def check_tag(value: int) -> None:
    """``ValueError`` unless the value can name an expected arrival."""
    if not 0 < value < TAG_LIMIT:
        raise ValueError(f"tag {value} must be between 1 and 2**64 - 1")
