# SPDX-License-Identifier: Apache-2.0
"""A process that owns the memory of a host's store, and does nothing else: one that an operator has
started (``kvstore serve``), or one that a server has, when it needed one."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from logging.handlers import RotatingFileHandler
from typing import Any, Final

import te
from kvstore.client.deadline import Deadline
from kvstore.config import CHUNK_BYTES_MAX, Config
from kvstore.host import agreement
from kvstore.host.directory import Directory
from kvstore.host.hosting import Brought, Hosting
from kvstore.host.lifetime import ENDING_S, GIVEN_WAY_S
from kvstore.host.messages import (
    BYTES_MAX,
    Join,
    Joined,
    Message,
    Refused,
    decode,
    encode,
)
from kvstore.host.place import Lock, Place
from kvstore.host.starting import STARTED
from kvstore.memory.host_memory import check_room, least_room
from kvstore.memory.memory_file import MemoryFile
from kvstore.memory.slab import Slab
from kvstore.owning import OwningStore
from kvstore.protocol.messages import VERSION
from kvstore.protocol.users import pid_of

__all__ = [
    "allow_open_files",
    "ended_by_signals",
    "lock_of",
    "main_of_started",
    "serve",
    "transit_chunk_bytes",
]

logger = logging.getLogger(__name__)

LOG_BYTES_MAX: Final = 1 << 20
"""Of each of two files."""
LABEL: Final = "store of this host"
TRANSIT_CHUNKS: Final = 8
"""Memory of an owner that lends none, by way of which objects come from other hosts and go to them.
It takes what it needs of it."""
CHUNK_BYTES_MIN: Final = 1 << 20
_SET_MEMPOLICY: Final = {"x86_64": 238, "aarch64": 237}
"""The number of set_mempolicy(2), for which the C library has no function."""
_MPOL_DEFAULT: Final = 0


def serve(
    config: Config,
    place: Place,
    lock: Lock,
    linger_s: float | None,
    started: Callable[[OwningStore], AbstractContextManager[None]],
) -> None:
    """Owns the store's memory until SIGTERM or SIGINT, or until nobody has used it for
    ``linger_s``; None: an operator has started it, and ends it.

    Args:
        config: with ``Config.memory``.
        lock: it is the owner as long as it has that.
        started: is entered when others can use the memory, and left before they cannot any more.

    Raises what ``Store`` raises.
    """
    hosting = Hosting(place, lock, agreement.pool(config), linger_s)
    is_left = True  # If this fails in between, somebody may hold what was there before.
    try:
        with ended_by_signals(hosting.end) as signalled_fd:
            hosting.wake_on(signalled_fd)
            is_started = linger_s is not None  # By a server.
            stays_s = math.inf if linger_s is None else linger_s
            brought = hosting.adopt() if is_started or config.file is None else None
            if brought is not None and is_started:
                config = agreement.wished(config, brought.was)
            elif brought is not None:
                brought = _fitting(config, brought)
            if config.copies > 1 and not config.index:
                logger.warning(
                    "copies=%d has no effect: without an index there is no other host",
                    config.copies,
                )
            lends = config.memory > 0
            used = config if lends else _in_transit(config)
            with contextlib.ExitStack() as stack:
                begins_to_end = stack.enter_context(_ending_in_time())
                memory = None
                if config.file is None and (is_started or brought is not None):
                    memory = _memory(used, brought)
                    stack.callback(memory.close)
                store = stack.enter_context(OwningStore(used, memory, lends=lends))
                stack.enter_context(store.answering(place.calls))
                stack.callback(begins_to_end)
                has = agreement.wishes(replace(config, linger_s=stays_s))
                hosting.ready(has, memory if lends else None)
                with started(store):
                    hosting.run()
                is_left = is_started and hosting.users > 0  # An operator means it to end.
                hosting.close(is_left=is_left)
    except BaseException:
        hosting.close(is_left=is_left)
        raise


@contextmanager
def _ending_in_time() -> Iterator[Callable[[], None]]:
    """Yields what is to be called when the process begins to end. A disk that hangs would else keep
    it for ever, and the host's lock with it: nobody could start the next owner."""
    begun, ended = threading.Event(), threading.Event()

    def watch() -> None:
        begun.wait()
        if not ended.wait(ENDING_S):
            logger.error("does not end within %g s, and is ended: does its disk hang?", ENDING_S)
            os._exit(1)

    # Begun now: there may be no more threads later.
    threading.Thread(target=watch, name="kvstore-end", daemon=True).start()
    try:
        yield begun.set
    finally:
        ended.set()
        begun.set()


def _in_transit(config: Config) -> Config:
    """With the memory of an owner that lends none."""
    room = least_room()
    chunk_bytes = transit_chunk_bytes(None if room is None else room.nbytes)
    if room is not None and chunk_bytes < CHUNK_BYTES_MAX:
        logger.warning(
            "%d MiB of memory are left %s: no object of more than %d MiB comes from other hosts",
            room.nbytes >> 20,
            room.where,
            chunk_bytes >> 20,
        )
    return replace(config, memory=TRANSIT_CHUNKS * chunk_bytes, chunk_bytes=chunk_bytes)


def transit_chunk_bytes(left: int | None) -> int:
    """So large that ``TRANSIT_CHUNKS`` of them take half of what is left at most, but no less than
    ``CHUNK_BYTES_MIN``. ``left``: bytes; None if that is not known. Pure."""
    nbytes = CHUNK_BYTES_MAX
    while left is not None and nbytes > CHUNK_BYTES_MIN and 2 * TRANSIT_CHUNKS * nbytes > left:
        nbytes //= 2
    return nbytes


def lock_of(config: Config, place: Place) -> Lock:
    """The right to own the host's store. An owner that a server has started is asked to give way;
    it may have to write much to a disk. ``ValueError`` says why it does not."""
    until, who = Deadline(GIVEN_WAY_S), "another process"
    while (lock := place.lock()) is None:
        pid, answer = _asked_to_give_way(config, place, until)
        who = f"the process {pid}" if pid else who
        if isinstance(answer, Joined):
            raise ValueError(
                f"the process {answer.pid} owns the store in {config.directory}, and an operator"
                " has started it: end it first, or give another --directory, and the servers the"
                " same"
            )
        if isinstance(answer, Refused):
            raise ValueError(
                f"the process {answer.pid} owns the store in {config.directory}, and {answer.why};"
                " else end it first, or give another --directory"
            )
        if until.is_over:
            raise ValueError(
                f"{who} owns the store in {config.directory}, and does not end within"
                f" {GIVEN_WAY_S:g} s: end it first"
            )
        time.sleep(0.05)
    return lock


def _asked_to_give_way(config: Config, place: Place, until: Deadline) -> tuple[int, Message | None]:
    """Which process listens, 0 if that is not known, and what the host's owner answers; None if it
    has ended, or does not listen yet."""
    pid = 0
    join = Join(VERSION, agreement.wishes(config), agreement.pool(config), takes_over=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(max(until.left_s, 0.001))
        try:
            line.connect(str(place.socket))
            pid = pid_of(line)
            line.send(encode(join))
            raw, fds, _, _ = socket.recv_fds(line, BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                os.close(fd)
            return pid, decode(raw) if raw else None
        except (OSError, ValueError):
            return pid, None


def _fitting(config: Config, brought: Brought) -> Brought | None:
    """The memory of the last owner, if it is such as an operator wants it. ``ValueError`` if there
    is no room for other memory beside it."""
    if agreement.is_same_memory(config, brought.was):
        return brought
    held = os.fstat(brought.fd).st_size
    os.close(brought.fd)
    try:
        check_room("memory", config.memory)
    except ValueError as exc:
        raise ValueError(
            f"{exc}. Servers of this host hold {held >> 20} MiB of the last owner's until there is"
            f" a next one: memory={brought.was.get('memory')} and"
            f" chunk_bytes={brought.was.get('chunk_bytes')} take that over, with all pages"
        ) from exc
    logger.warning(
        "the pages of the last owner are gone: it had memory=%s and chunk_bytes=%s",
        brought.was.get("memory"),
        brought.was.get("chunk_bytes"),
    )
    return None


def _memory(config: Config, brought: Brought | None) -> MemoryFile:
    """That of the last owner, or new one."""
    nbytes = Slab(config.memory, config.chunk_bytes_used).nbytes
    if brought is not None:
        try:
            return MemoryFile.adopt(brought.fd, nbytes, brought.name)
        except (ValueError, OSError) as exc:
            logger.warning("the memory of the last owner cannot be used: %s", exc)
        finally:
            os.close(brought.fd)
    check_room("memory", config.memory)
    return MemoryFile.make(nbytes)


@contextmanager
def ended_by_signals(end: Callable[[], None]) -> Iterator[int]:
    """Yields a descriptor that can be read once a signal has come. Python calls ``end`` when the
    main thread next runs Python, and a signal that another thread gets, or that comes just before
    the main thread's system call, does not wake it from that."""
    signalled, signals = socket.socketpair()
    with signalled, signals:
        signals.setblocking(False)
        former_fd = signal.set_wakeup_fd(signals.fileno(), warn_on_full_buffer=False)
        former = {
            number: signal.signal(number, lambda *_: end())
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            yield signalled.fileno()
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former_fd)


def allow_open_files() -> None:
    """As many as the host lets this process have: each other process of the store takes some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# -- one that a server has started


def main_of_started(lock_fd: int) -> int:
    """Of a process of ``Starting``. Returns its exit status."""
    _become_new()
    config = agreement.of_bytes(sys.stdin.buffer.read())
    label = replace(config.engine, label=LABEL)
    try:
        directory = Directory(config.directory)  # Which cleaners leave alone as long as it is here.
        place = Place(config.directory)
        _log_to(place)
        logger.info("owns the memory of the store in %s", config.directory)
        serve(replace(config, engine=label), place, Lock(lock_fd), config.linger_s, _report)
    except (te.Error, ValueError, OSError) as exc:
        logger.error("ends: %s", exc)
        with contextlib.suppress(OSError):
            os.write(1, str(exc).encode())
        return 1
    except Exception as exc:
        logger.exception("a bug in the store: its owner ends")
        with contextlib.suppress(OSError):
            os.write(1, f"a bug in the store: {exc!r}".encode())
        return 1
    logger.info("ends")
    directory.close()
    return 0


def _become_new() -> None:
    """What a new process has from the one that has started it, and does not need."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # A server may be bound to the cores of one GPU,
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    call = _SET_MEMPOLICY.get(os.uname().machine)
    if call is not None:  # and to the memory beside them.
        ctypes.CDLL(None).syscall(call, _MPOL_DEFAULT, None, 0)
    os.umask(0o077)
    allow_open_files()


def _log_to(place: Place) -> None:
    handler = RotatingFileHandler(place.log, maxBytes=LOG_BYTES_MAX, backupCount=1)
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    threading.excepthook = _log_exception


def _log_exception(failed: Any) -> None:
    information = (failed.exc_type, failed.exc_value, failed.exc_traceback)
    logger.error("a thread has ended by an exception", exc_info=information)


@contextmanager
def _report(_: OwningStore) -> Iterator[None]:
    """It has started: nobody reads what it prints from now on."""
    with contextlib.suppress(OSError):  # The one that has started it may have ended.
        os.write(1, STARTED)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    yield
