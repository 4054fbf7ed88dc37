# SPDX-License-Identifier: Apache-2.0
"""Streams and events as a GPU has them, with nothing but threads behind: work that is left on a
stream is done later, by one thread, after a seeded time, in the order of the stream.

Only what SGLang and the hand-over use of `torch.cuda.Stream` and `torch.cuda.Event` is here.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["Device", "Event", "Stream", "StreamContext", "current_stream", "device", "reset"]

#: A wait that takes longer means that the stand-in is broken: no delay comes near it.
_WAIT_TIMEOUT_S = 60.0
LONG_ONE_IN = 8


class _Op:
    """A piece of work on a stream; an event is one that does nothing."""

    __slots__ = ("action", "after", "done", "done_s", "due_s", "duration_s")

    def __init__(
        self, action: Callable[[], None] | None, after: list[_Op], duration_s: float
    ) -> None:
        self.action, self.after, self.duration_s = action, after, duration_s
        self.due_s: float | None = None  # known once all of `after` is done
        self.done = False
        self.done_s = 0.0  # when


class Device:
    """Does the work of all streams in one thread, which starts with the first piece.

    Args:
        delay_s: time of a long piece of work. One in `LONG_ONE_IN` takes it, as the seed decides;
            the others take hardly any. So a run is not slow, and who reads too early is so by far.
        layer_s: what each layer of a forward takes besides: at most that, at least half of it.
        seed: of these choices.
    """

    def __init__(self, delay_s: float = 0.0, layer_s: float = 0.0, seed: int = 0) -> None:
        self._delay_s, self._layer_s, self._random = delay_s, layer_s, random.Random(seed)
        self._changed = threading.Condition()
        self._pending: list[_Op] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(
        self, action: Callable[[], None] | None, after: list[_Op], is_layer: bool = False
    ) -> _Op:
        with self._changed:
            is_long = self._random.randrange(LONG_ONE_IN) == 0
            duration_s = is_long * self._delay_s
            if is_layer:
                duration_s += self._layer_s * self._random.uniform(0.5, 1.0)
            op = _Op(action, [a for a in after if not a.done], duration_s)
            self._pending.append(op)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="device", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return op

    def wait(self, op: _Op) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: op.done or self._error, _WAIT_TIMEOUT_S):
                raise TimeoutError(f"a stream did not get anywhere in {_WAIT_TIMEOUT_S:.0f} s")
            if self._error is not None:
                raise RuntimeError("a piece of work on a stream failed") from self._error

    def wait_all(self) -> None:
        with self._changed:
            pending = list(self._pending)
        for op in pending:
            self.wait(op)

    def _run(self) -> None:
        while True:
            op = self._next()
            try:
                if op.action is not None:
                    op.action()
            except BaseException as error:  # noqa: BLE001 - told to everyone who waits
                self._error = error
            with self._changed:
                self._pending.remove(op)
                op.done, op.done_s, op.action, op.after = True, time.monotonic(), None, []
                self._changed.notify_all()

    def _next(self) -> _Op:
        """The first piece whose time is over, once there is one."""
        with self._changed:
            while True:
                now_s = time.monotonic()
                for op in self._pending:
                    if op.due_s is None and all(a.done for a in op.after):
                        op.due_s = now_s + op.duration_s
                due = [op for op in self._pending if op.due_s is not None]
                first = min(due, key=lambda op: op.due_s or 0.0, default=None)
                if first is not None and first.due_s is not None and first.due_s <= now_s:
                    return first
                self._changed.wait(
                    None if first is None else max(0.0, (first.due_s or 0.0) - now_s)
                )


_device = Device()


def device() -> Device:
    return _device


def reset(new: Device) -> None:
    """From now on streams leave their work with this device."""
    global _device
    _device = new


_handles = itertools.count(1)


class Stream:
    """See `torch.cuda.Stream`."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.cuda_stream = next(_handles)
        self._tails: list[_Op] = []  # what the next piece of work must come after

    def launch(self, action: Callable[[], None] | None, *, is_layer: bool = False) -> _Op:
        """Leaves a piece of work and returns at once. `is_layer`: one layer of a forward."""
        op = device().submit(action, self._tails, is_layer)
        self._tails = [op]
        return op

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self._tails += event.ops

    def wait_stream(self, other: Stream) -> None:
        self._tails += [op for op in other._tails if not op.done]

    def query(self) -> bool:
        return all(op.done for op in self._tails)

    def synchronize(self) -> None:
        for op in list(self._tails):
            device().wait(op)


class Event:
    """See `torch.cuda.Event`. One that was never recorded has happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.ops: list[_Op] = []

    def record(self, stream: Stream | None = None) -> None:
        self.ops = [(stream or current_stream()).launch(None)]

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        return all(op.done for op in self.ops)

    def synchronize(self) -> None:
        for op in self.ops:
            device().wait(op)

    def elapsed_time(self, end: Event) -> float:
        """In milliseconds; both have happened."""
        return (end.ops[0].done_s - self.ops[0].done_s) * 1000


_default_stream = Stream()
_current = threading.local()


def current_stream(_device: Any = None) -> Stream:
    """That of the calling thread."""
    return getattr(_current, "stream", _default_stream)


class StreamContext(AbstractContextManager[None]):
    """Makes a stream the current one of this thread; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[Stream] = []

    def __enter__(self) -> None:
        self._before.append(current_stream())
        _current.stream = self.stream or current_stream()

    def __exit__(self, *_exc: object) -> None:
        _current.stream = self._before.pop()
