# SPDX-License-Identifier: Apache-2.0
"""A rank's spans in SGLang's own OpenTelemetry traces, with `--enable-trace`.

SGLang's scheduler holds the trace of a request, and makes the request's sender or receiver without
it. A hook on the method of SGLang's queue that makes them remembers which trace the room belongs
to. The spans are made when the room is over, by a thread of this module; the SDK's own thread sends
them to the collector.

Without `--enable-trace` nothing is hooked, no thread runs and OpenTelemetry is not imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.runtime_context import get_observability

from sglang_mooncake.context import Role
from sglang_mooncake.rooms.room import Room
from sglang_mooncake.spans import Span, span
from sglang_mooncake.stats import Recorder
from sglang_mooncake.story import RoomStory

__all__ = ["Parent", "Tracing", "hook_queue", "open_tracing", "parent_of"]

logger = logging.getLogger(__name__)

#: Names of --trace-modules: SGLang's spans of a request, and those of this backend below them.
_MODULES: Final = frozenset({"request", "mooncake"})
#: Where SGLang's scheduler makes a sender or a receiver: module, class, method. Its first argument
#: is the request.
_MAKERS: Final = {
    "prefill": ("sglang.srt.disaggregation.prefill", "PrefillBootstrapQueue", "create_sender"),
    "decode": (
        "sglang.srt.disaggregation.decode",
        "DecodePreallocQueue",
        "_create_receiver_and_enqueue",
    ),
}
#: The SDK's queue takes 2,048 spans by default, SGLang's own among them: small portions.
_INTERVAL_S: Final = 0.2
#: Between two rooms, for the threads that wait for the interpreter: a room's spans take 0.1 ms.
#: Without it, 300 rooms in a row kept another thread from running for 5 ms (median), with it for
#: 0.07 ms.
_PAUSE_S: Final = 0.0005
#: Rooms that end within an interval; further ones push out the oldest.
_STORIES_MAX: Final = 4096
_CLOSE_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Parent:
    """context: the `SpanContext` of SGLang's span for the request on this rank.
    level: SGLang's trace level of the request.
    """

    context: Any
    level: int


def open_tracing(role: Role, recorder: Recorder) -> Tracing | None:
    """The tracing of this rank; None, with a sentence in the log, where it cannot be had, and
    without one where the server was started without --enable-trace."""
    observability = get_observability()
    if not observability.enable_trace:
        return None
    problem = _left_out(observability.trace_modules) or _missing() or hook_queue(role)
    if problem is not None:
        logger.warning("no OpenTelemetry spans of the KV-cache hand-over: %s", problem)
        return None
    from opentelemetry import trace

    return Tracing(recorder, trace.get_tracer("sglang_mooncake"))


def _left_out(modules: str | None) -> str | None:
    """SGLang's --trace-modules: None stands for all of them."""
    named = _MODULES if modules is None else {name.strip() for name in modules.split(",")}
    if named >= _MODULES:
        return None
    return f"--trace-modules is {modules!r}; give --trace-modules request,mooncake to have them"


def _missing() -> str | None:
    from sglang.srt.observability.trace import get_global_tracing_enabled

    if get_global_tracing_enabled():
        return None
    return (
        "SGLang has not started its tracing, as when OpenTelemetry's SDK or exporters are not "
        "installed: pip install 'sglang-mooncake[trace]'"
    )


def hook_queue(role: Role) -> str | None:
    """Has SGLang's queue tell the manager's `tracing` which request it makes a sender or receiver
    for. Says what is missing in this SGLang, if anything is. Idempotent."""
    module, name, method = _MAKERS[role]
    owner = getattr(importlib.import_module(module), name, None)
    original = getattr(owner, method, None)
    if getattr(original, "of_sglang_mooncake", False):
        return None
    if original is None or list(inspect.signature(original).parameters)[:2] != ["self", "req"]:
        return f"this version of SGLang has no {name}.{method}(req)"

    @functools.wraps(original)
    def make(queue: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = getattr(queue.kv_manager, "tracing", None)
        if tracing is None:  # a manager of another backend, or one that came before a role switch
            return original(queue, req, *args, **kwargs)
        with tracing.request(req.time_stats.trace_ctx):
            return original(queue, req, *args, **kwargs)

    make.of_sglang_mooncake = True  # type: ignore[attr-defined]
    setattr(owner, method, make)
    return None


def parent_of(trace_ctx: Any) -> Parent | None:
    """SGLang's span of the request on this rank, or, with SGLANG_TRACE_ASYNC=1, where another
    process makes that one, the root of the request's spans. None for a request that is not traced.

    Args:
        trace_ctx: a `TraceReqContext`, `TraceReqContextAsync` or `TraceNullContext`.
    """
    if not trace_ctx.tracing_enable:
        return None
    from opentelemetry import trace

    thread = getattr(trace_ctx, "thread_context", None)
    of_rank = (
        trace.get_current_span(trace_ctx.root_span_context)
        if thread is None
        else thread.thread_span
    )
    context, level = of_rank.get_span_context(), int(trace_ctx.trace_level)
    is_wanted = level > 0 and context.is_valid and context.trace_flags.sampled
    return Parent(context, level) if is_wanted else None


class Tracing:
    """The spans of one rank's rooms. `request` is for the scheduler thread.

    Args:
        tracer: an `opentelemetry.trace.Tracer`.
    """

    def __init__(self, recorder: Recorder, tracer: Any) -> None:
        self._tracer = tracer
        #: Of the request whose sender or receiver the scheduler makes now.
        self._making: Parent | None = None
        #: Of the rooms that are not over, by serial.
        self._parents: dict[int, Parent] = {}
        self._over: deque[tuple[Parent, RoomStory]] = deque(maxlen=_STORIES_MAX)
        self._has_warned = False
        self._ending = threading.Event()
        recorder.on_room_opened(self._opened)
        recorder.on_room_over(self._room_over)
        self._thread = threading.Thread(target=self._run, name="kv-traces", daemon=True)
        self._thread.start()

    @contextmanager
    def request(self, trace_ctx: Any) -> Iterator[None]:
        """Rooms that are opened meanwhile belong to this request."""
        try:
            self._making = parent_of(trace_ctx)
        except AttributeError as error:  # a release whose contexts are made otherwise
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "no OpenTelemetry spans of the KV-cache hand-over: this version of SGLang has "
                    "other trace contexts (%s)",
                    error,
                )
        try:
            yield
        finally:
            self._making = None

    def close(self) -> None:
        """Makes the spans of all rooms that are over. Idempotent."""
        self._ending.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _opened(self, room: Room) -> None:
        """On the scheduler thread, before the loop knows of the room."""
        if self._making is not None:
            self._parents[room.serial] = self._making

    def _room_over(self, story: RoomStory) -> None:
        """On the loop thread."""
        parent = self._parents.pop(story.serial, None)
        if parent is not None:
            self._over.append((parent, story))

    def _run(self) -> None:
        while not self._ending.wait(_INTERVAL_S):
            self._tell()
        self._tell()

    def _tell(self) -> None:
        epoch_ns = time.time_ns() - time.monotonic_ns()
        while self._over:
            parent, story = self._over.popleft()
            try:
                self._make(span(story, epoch_ns, parent.level), parent.context)
            except Exception:  # of the SDK, or of what the operator has plugged into it
                logger.exception("cannot make the OpenTelemetry spans of room %d", story.room)
            self._ending.wait(_PAUSE_S)

    def _make(self, one: Span, parent: Any) -> None:
        from opentelemetry.trace import (
            NonRecordingSpan,
            Status,
            StatusCode,
            set_span_in_context,
        )

        made = self._tracer.start_span(
            one.name,
            set_span_in_context(NonRecordingSpan(parent)),
            attributes=one.attributes,
            start_time=one.began_ns,
        )
        for event in one.events:
            made.add_event(event.name, event.attributes, event.at_ns)
        if one.error is not None:
            made.set_status(Status(StatusCode.ERROR, one.error))
        for child in one.children:
            self._make(child, made.get_span_context())
        made.end(one.ended_ns)
