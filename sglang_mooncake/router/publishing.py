# SPDX-License-Identifier: Apache-2.0
"""``sglang-mooncake store-events`` as a process: publishes what the store has, and repeats it.

It is a process of its own, because libzmq can be made to abort by whoever claims an id at a ROUTER
(``bootstrap_server.admission.routing_ids``). What keeps other ROUTERs of this package from that
leaves one frame for each message, and what is repeated has five.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final, Self

import zmq

from bootstrap_server.admission.secret_file import read_keys
from kvstore.rate_limited_log import RateLimitedLog
from kvstore.store import Store
from sglang_mooncake.router.store_events import PAGES_MAX, Batch, StoreEvents
from sglang_mooncake.router.store_events_options import StoreEventsOptions
from sglang_mooncake.router.store_source import StoreSource, open_store

__all__ = ["Publisher", "follow", "publish_store"]

logger = logging.getLogger(__name__)

#: Between two looks at the store, at least; and so many times as long as the last look took.
LOOK_S: Final = 0.5
REST: Final = 10.0
#: Batches that wait for one subscriber, as SGLang's publishers have it.
PUBLISHED_HWM: Final = 100_000
#: A question has 8 bytes; the greetings of ZeroMQ some hundred.
QUESTION_BYTES_MAX: Final = 1024
EXIT_CANNOT_LISTEN: Final = 1
EXIT_REFUSED: Final = 2
#: Behind the last batch that is repeated.
_END: Final = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """The sockets, for one thread. ``zmq.ZMQError`` if it cannot listen."""

    def __init__(self, events: StoreEvents, options: StoreEventsOptions) -> None:
        self._events = events
        self._topic = options.topic.encode()
        self._bad = RateLimitedLog(logger)
        with contextlib.ExitStack() as undo:
            context = zmq.Context()
            undo.callback(context.destroy, linger=0)
            # What is kept has to fit, whenever it is asked for: a ROUTER leaves out what does not,
            # and hears only of half of what fits that it was read.
            repeated = 2 * (events.batches_max + 1) + 1
            self._published = _bound(context, zmq.PUB, options.endpoint, PUBLISHED_HWM)
            self._questions = _bound(context, zmq.ROUTER, options.replay_endpoint, repeated)
            self._undo = undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._undo.close()

    @property
    def endpoints(self) -> tuple[str, str]:
        """Where events are published, and repeated."""
        sockets = self._published, self._questions
        first, second = (one.getsockopt_string(zmq.LAST_ENDPOINT) for one in sockets)
        return first, second

    def publish(self, batches: Sequence[Batch]) -> None:
        """Waits for nobody: who does not read has to ask for what he has missed."""
        if len(batches) > self._events.batches_max:
            logger.warning(
                "%d batches at once, of which the last %d are repeated (--buffer-steps)",
                len(batches),
                self._events.batches_max,
            )
        for number, payload in batches:
            self._published.send_multipart([self._topic, _as_bytes(number), payload])

    def answer(self, wait_s: float) -> None:
        """Repeats batches for all who ask within this time."""
        until_s = time.monotonic() + wait_s
        while (left_s := until_s - time.monotonic()) > 0:
            if self._questions.poll(math.ceil(left_s * 1e3)):
                self._repeat(self._questions.recv_multipart())

    def _repeat(self, question: Sequence[bytes]) -> None:
        if len(question) != 3 or len(question[2]) != len(_END):
            self._bad.warn("a question for events is not of SGLang's form, and is not answered")
            return
        asker, _, first = question
        for number, payload in self._events.since(int.from_bytes(first, "big")):
            self._questions.send_multipart([asker, b"", self._topic, _as_bytes(number), payload])
        self._questions.send_multipart([asker, b"", b"", _END, b""])


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, at: str, hwm: int
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(hwm)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, QUESTION_BYTES_MAX)
    try:
        socket.bind(at)
    except zmq.ZMQError as error:
        raise zmq.ZMQError(error.errno, f"cannot listen at {at}: {error.strerror}") from error
    return socket


def _as_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")


def follow(
    store: Store, events: StoreEvents, publisher: Publisher, is_ended: threading.Event
) -> None:
    """Publishes what changes in ``store``, until ``is_ended``."""
    source = StoreSource(store)  # Says in the log when no owner answers.
    version, tells_all = None, True
    while not is_ended.is_set():
        source.look()
        began_s = time.monotonic()
        found = store.keys(version)
        if found is not None:
            version, keys = found
            publisher.publish(events.batches(keys, time.time()))
            if tells_all and not events.tells_all:
                logger.warning(
                    "%d pages are too many to be told anew: who subscribes late does not learn of "
                    "all of them; --buffer-steps has to be above 2 for each %d pages",
                    len(keys),
                    PAGES_MAX,
                )
            tells_all = events.tells_all
        now_s = time.monotonic()
        next_s = now_s + max(LOOK_S, REST * (now_s - began_s))
        while not is_ended.is_set() and time.monotonic() < next_s:
            publisher.answer(LOOK_S)


def publish_store(options: StoreEventsOptions) -> int:
    """Until SIGINT or SIGTERM; the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    is_ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: is_ended.set())
    events = StoreEvents(options.page_size, options.batches)
    with contextlib.ExitStack() as undo:
        option = "--secret-file"
        try:
            publisher = undo.enter_context(Publisher(events, options))
            keys = read_keys(options.secret_file)
            option = "--store"
            store = undo.enter_context(contextlib.closing(open_store(options.store, keys)))
        except zmq.ZMQError as error:
            return _said(str(error), EXIT_CANNOT_LISTEN)
        except (ValueError, OSError) as error:
            return _said(f"{option}: {error}", EXIT_REFUSED)
        logger.info(
            "what the store has is published at %s, and repeated at %s", *publisher.endpoints
        )
        follow(store, events, publisher, is_ended)
    return 0


def _said(why: str, status: int) -> int:
    sys.stderr.write(f"sglang-mooncake store-events: {why}\n")
    return status
