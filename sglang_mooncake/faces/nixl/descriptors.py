# SPDX-License-Identifier: Apache-2.0
"""Lists of descriptors as ``nixl._bindings`` has them: rows of address, bytes and device. Pure.

They are pickled by the path of this module, so that any process with this package reads them,
whether or not the face is installed in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from sglang_mooncake.faces.nixl.names import NotFound, Segment

__all__ = ["RegDList", "RemoteDList", "Rows", "XferDList"]

Rows: TypeAlias = npt.NDArray[np.uint64]

_NO_ROWS: Final[Rows] = np.empty((0, 3), np.uint64)
_LIMIT: Final = 1 << 64


class _DList:
    """A list of one segment. Not thread-safe, as NIXL's are not.

    What a descriptor has beside its three numbers (`_extra_of`) lies in a list of its own.
    """

    #: What a tuple has, for messages.
    _tuple_length = 3

    def __init__(self, type: Segment, descs: Any = 0) -> None:  # noqa: A002 - NIXL's name for it
        """
        Args:
            descs: a list of tuples; an array of shape (n, 3), C-contiguous, of uint64 or int64; or
                a number: of descriptors that are all zeros.

        Raises:
            ValueError: another shape, dtype or length of tuples.
            TypeError: an element is no tuple, or a number of it is none that fits 64 bits.
        """
        self._segment = Segment(type)
        self._rows: Rows = _NO_ROWS
        #: What was appended since the array was made.
        self._more: list[tuple[int, int, int]] = []
        self._extras: list[Any] = []
        if isinstance(descs, np.ndarray):
            self._rows = _checked(descs)
            self._extras = [self._extra_of(())] * len(self._rows)
        elif isinstance(descs, int):
            self._rows = np.zeros((descs, 3), np.uint64)
            self._extras = [self._extra_of(())] * descs
        elif isinstance(descs, list):
            for one in descs:
                if not isinstance(one, tuple):
                    raise TypeError("Each descriptor must be a tuple when provided as a list")
                self.append(one)
        else:
            raise TypeError(f"descriptors are a list or an array, not {descs.__class__.__name__}")

    # -- what te's side of the face reads

    @property
    def rows(self) -> Rows:
        """Shape (n, 3): address, bytes, device. Not to be changed."""
        if self._more:
            self._rows = np.concatenate((self._rows, np.array(self._more, np.uint64)))
            self._more = []
        return self._rows

    # -- NIXL's methods

    def getType(self) -> Segment:  # noqa: N802
        return self._segment

    def descCount(self) -> int:  # noqa: N802
        return len(self._extras)

    def isEmpty(self) -> bool:  # noqa: N802
        return not self._extras

    def append(self, desc: tuple[Any, ...]) -> None:
        row, extra = self._split(desc)
        self._more.append(row)
        self._extras.append(extra)

    addDesc = append  # noqa: N815

    def remDesc(self, index: int) -> None:  # noqa: N802
        """``IndexError`` if there is none."""
        self._check(index)
        self._rows = np.delete(self.rows, index, axis=0)
        del self._extras[index]

    def clear(self) -> None:
        self._rows, self._more, self._extras = _NO_ROWS, [], []

    def index(self, desc: tuple[Any, ...]) -> int:
        """The first that equals it; ``nixlNotFoundError``."""
        row, extra = self._split(desc)
        for i in np.flatnonzero((self.rows == np.array(row, np.uint64)).all(axis=1)).tolist():
            if self._extras[i] == extra:
                return int(i)
        raise NotFound(f"no descriptor {desc!r:.200} in the list")

    def print(self) -> None:
        sys.stdout.write(f"{self!r}\n" + "".join(f"  {one}\n" for one in self))

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        self._check(index)
        row = self.rows[index]
        return self._joined((int(row[0]), int(row[1]), int(row[2])), self._extras[index])

    def __setitem__(self, index: int, desc: tuple[Any, ...]) -> None:
        self._check(index)
        row, self._extras[index] = self._split(desc)
        self._rows = self.rows.copy()  # Its array may be the caller's.
        self._rows[index] = row

    def __len__(self) -> int:
        return len(self._extras)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[i] for i in range(len(self._extras)))

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, _DList)
            and self._segment == other._segment
            and self._extras == other._extras
            and bool(np.array_equal(self.rows, other.rows))
        )

    __hash__ = None  # type: ignore[assignment]  # It can be changed.

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._extras)} in {self._segment.name}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (type(self), int(self._segment), self.rows.tobytes(), self._extras)

    @classmethod
    def of_rows(cls, segment: Segment, rows: Rows, extras: list[Any]) -> Self:
        """As they are: ``extras`` has one for each row."""
        made = cls(segment)
        made._rows, made._extras = rows, extras
        return made

    # -- the fourth part

    def _extra_of(self, rest: tuple[Any, ...]) -> Any:  # noqa: ARG002 - other lists have one
        return None

    def _joined(self, row: tuple[int, int, int], extra: Any) -> tuple[Any, ...]:  # noqa: ARG002
        return row

    def _split(self, desc: tuple[Any, ...]) -> tuple[tuple[int, int, int], Any]:
        if len(desc) != self._tuple_length:
            raise ValueError(
                f"Each descriptor tuple must have exactly {self._tuple_length} elements"
            )
        row = (_number(desc[0]), _number(desc[1]), _number(desc[2]))
        return row, self._extra_of(desc[3:])

    def _check(self, index: int) -> None:
        if index < 0:
            raise TypeError(f"an index is not negative, as {index} is")
        if index >= len(self._extras):
            raise IndexError(f"no descriptor {index}: the list has {len(self._extras)}")


class XferDList(_DList):
    """``nixlXferDList``: what is copied, (address, bytes, device)."""


class RegDList(_DList):
    """``nixlRegDList``: what is registered, (address, bytes, device, text)."""

    _tuple_length = 4

    def trim(self) -> XferDList:
        """The same without the texts."""
        return XferDList.of_rows(self._segment, self.rows, [None] * len(self._extras))

    def _extra_of(self, rest: tuple[Any, ...]) -> bytes:
        text = rest[0] if rest else b""
        if isinstance(text, str):
            return text.encode()
        if isinstance(text, bytes):
            return text
        return str(text).encode()

    def _joined(self, row: tuple[int, int, int], extra: Any) -> tuple[Any, ...]:
        return (*row, extra)


class RemoteDList(_DList):
    """``nixlRemoteDList``: (address, bytes, device, name of the agent)."""

    _tuple_length = 4

    def _extra_of(self, rest: tuple[Any, ...]) -> str:
        name = rest[0] if rest else ""
        return name.decode() if isinstance(name, bytes) else str(name)

    def _joined(self, row: tuple[int, int, int], extra: Any) -> tuple[Any, ...]:
        return (*row, extra)


def _unpickled(kind: type[_DList], segment: int, rows: bytes, extras: list[Any]) -> _DList:
    """``ValueError`` for what no list would have written."""
    array = np.frombuffer(rows, np.uint64).reshape(-1, 3)
    if not issubclass(kind, _DList) or len(array) != len(extras):
        raise ValueError("the pickle is of no list of descriptors")
    return kind.of_rows(Segment(segment), array, list(extras))


def _checked(array: npt.NDArray[Any]) -> Rows:
    if array.ndim != 2 or array.shape[1] != 3:
        raise ValueError("descs must be a Nx3 numpy array")
    if array.dtype not in (np.uint64, np.int64):
        raise ValueError("descs must be a Nx3 numpy array of uint64 or int64")
    if not array.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")
    return array.view(np.uint64).copy()


def _number(value: Any) -> int:
    """``TypeError`` unless it is an integer of 64 bits without a sign."""
    number = int(value) if hasattr(value, "__index__") else -1
    if not 0 <= number < _LIMIT:
        raise TypeError(f"{value!r:.80} is no integer between 0 and 2**64")
    return number
