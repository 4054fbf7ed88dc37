# SPDX-License-Identifier: Apache-2.0
"""What the store costs with many owners.

Five parts, each the real one beside stand-ins for the rest of the cluster:

* *table*: one process's table of all objects, entries of `--owners` owners;
* *client*: one process that follows so many owners, which all announce `--changes` a second (these
  owners are one process that speaks their side of the protocol);
* *owner*: one owner that so many processes follow;
* *index*: a Redis server at which so many owners renew their entries, once a second each;
* *registry*: the same at a registry of this package, with a secret.

Prints one JSON object. Processor time is that of the process in question, for each second; of a
client also that of the one thread that follows (`follower_cpu_s_per_s`). In most of that time no
other thread of the process has the interpreter, such as SGLang's scheduler.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    PARSER = Parser(
        ".venv/bin/python scripts/store_scale.py",
        __doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    PARSER.add_argument("--owners", type=int, default=1000)
    PARSER.add_argument("--objects", type=int, default=10_000_000, help="in the table")
    PARSER.add_argument("--changes", type=float, default=1560.0, help="of each owner, a second")
    PARSER.add_argument("--seconds", type=float, default=10.0)
    PARSER.add_argument("--parts", default="table,client,owner,index,registry")
    OPTIONS = PARSER.parse_args()

import numpy as np
import redis
import zmq

from bootstrap_server import BootstrapServer
from bootstrap_server.admission.secret import Keys
from kvstore._table import Table
from kvstore.client.following import Following
from kvstore.membership.index_redis import KEYS, SCRIPT
from kvstore.membership.index_registry import RegistryIndex
from kvstore.membership.members import FORGOTTEN_S
from kvstore.objects.changes import ADDED, CHANGE, OWNERS_MAX, PLACE, REMOVED, Records
from kvstore.owner.followers import ANSWER_S, NEWS_S
from kvstore.owner.service import Service
from kvstore.protocol.messages import (
    Changes,
    Follow,
    Greet,
    Hello,
    Snapshot,
    decode_answer,
    decode_question,
    encode,
    split,
)
from kvstore.protocol.sockets import Sockets, Where
from kvstore.rules.change_log import ChangeLog

FINGERPRINT = 7
KEYS_KEPT = 1 << 16
Told = tuple[bytes, Sequence[bytes] | None]
"""What an index answers: see ``kvstore.membership.members.Index``."""
REGISTRY_KEYS = Keys.from_secrets([b"the secret of a registry that is measured"]).registry
STEP_S = 0.02
"""How often the owners' changes are made: as often as a busy server stores a batch of pages."""


def records(first: int, count: int, op: int = ADDED) -> Records:
    """Changes with the keys of some numbers, which look like digests."""
    found = np.zeros(count, CHANGE)
    numbers = np.arange(first, first + count, dtype="<u8")
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    found["key"] = np.stack([mixed, numbers], axis=1).view("V16").reshape(-1)
    found["fingerprint"], found["slot"], found["op"] = FINGERPRINT, numbers & 0xFFFFFFFF, op
    return found


def table(owners: int, objects: int) -> dict[str, float]:
    """Entries are put in owner by owner, and so do the changes come whose time is taken."""
    made = Table()
    each = objects // owners
    for owner in range(owners):
        made.apply(1 + owner % (OWNERS_MAX - 1), records(owner * each, each))
    ranks, places = bytes([1]) * OWNERS_MAX, np.empty(1000, PLACE)
    rng = np.random.default_rng(1)

    def looked_up() -> float:
        rows = rng.integers(0, objects // owners * owners, 1000)
        keys = np.concatenate([records(int(row), 1)["key"] for row in rows])
        begin_s = time.perf_counter()
        found = made.look_up(keys.view(np.uint8), FINGERPRINT, ranks, places)
        assert found == 1000, found
        return time.perf_counter() - begin_s

    def changed(turn: int) -> float:
        owner = turn % owners
        gone = records(owner * each, min(each, 500), REMOVED)
        back = records(owner * each, len(gone))
        begin_s = time.perf_counter()
        made.apply(1 + owner % (OWNERS_MAX - 1), np.concatenate([gone, back]))
        return (time.perf_counter() - begin_s) / 2 / len(gone)

    return {
        "objects": len(made),
        "bytes_per_object": made.nbytes / len(made),
        "look_up_of_1000_us": 1e6 * float(np.median([looked_up() for _ in range(50)])),
        "change_us": 1e6 * float(np.median([changed(turn) for turn in range(100)])),
    }


# -- a client of many owners


def stand_in_owners(endpoint: str, owners: int, changes_per_s: float, parent: Connection) -> None:
    """Each connection is an owner of its own, which as many processes follow as there are owners.
    Its objects are the numbers that it has made."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    parent.send("ready")
    pause_s = max(min(owners * NEWS_S, ANSWER_S), STEP_S)
    waiting: dict[bytes, tuple[bytes, int]] = {}
    told_s: dict[bytes, float] = {}
    firsts: dict[bytes, int] = {}
    begin_s = time.monotonic()
    until_s = begin_s
    while not parent.poll():
        if router.poll(5):
            client, frame = router.recv_multipart()
            request_id, raw = split(frame)
            match decode_question(raw):
                case Greet():
                    firsts[client] = len(firsts) << 24
                    hello = Hello(b"", 1, 0, 0, 1, 1 << 20, 1, made_at(begin_s, changes_per_s))
                    router.send_multipart([client, request_id + encode(hello)])
                case Snapshot():
                    empty = encode(Changes(1, 0, b""))
                    router.send_multipart([client, request_id + empty])
                case Follow(number):
                    waiting[client] = request_id, number
        now_s = time.monotonic()
        if now_s < until_s:
            continue
        until_s = now_s + STEP_S
        made = made_at(begin_s, changes_per_s)
        for client, (request_id, number) in list(waiting.items()):
            if now_s >= told_s.get(client, begin_s) + pause_s:
                told_s[client] = now_s
                found = records(firsts[client] + number, made - number)
                answer = encode(Changes(1, made, found.tobytes()))
                router.send_multipart([client, request_id + answer])
                del waiting[client]
    parent.send(cpu_s())


def made_at(begin_s: float, changes_per_s: float) -> int:
    """How many changes an owner has made by now."""
    return int((time.monotonic() - begin_s) * changes_per_s)


def client(owners: int, changes_per_s: float, seconds: float) -> dict[str, float]:
    """A real `Far`, with its table, in this process."""
    with tempfile.TemporaryDirectory(prefix="kv") as directory, both_ends() as (mine, theirs):
        endpoint = f"ipc://{directory}/owners"
        process = get_context("spawn").Process(
            target=stand_in_owners, args=(endpoint, owners, changes_per_s, theirs)
        )
        process.start()
        mine.recv()
        made, heard = Table(), set[int]()

        def set_heard(number: int, is_heard: bool) -> bool:
            (heard.add if is_heard else heard.discard)(number)
            return False

        where = {f"{number:032x}": [Where(endpoint)] for number in range(owners)}
        sockets = Sockets()
        far = Following(made, set_heard, sockets, lambda: where, lambda: None, lambda _: None, 2.0)
        far.start()
        wait_for(lambda: len(heard) == owners)
        time.sleep(2.0)
        follower_s = cpu_clock_of("kvstore-client")
        before, cpu_before_s, begin_s = len(made), cpu_s(), time.monotonic()
        follower_before_s = follower_s()
        time.sleep(seconds)
        wall_s = time.monotonic() - begin_s
        figures = {
            "changes_per_s": (len(made) - before) / wall_s,
            "wanted_changes_per_s": owners * changes_per_s,
            "cpu_s_per_s": (cpu_s() - cpu_before_s) / wall_s,
            "follower_cpu_s_per_s": (follower_s() - follower_before_s) / wall_s,
            "silent_owners": float(owners - len(heard)),
        }
        mine.send("stop")
        mine.recv()
        process.join()
        far.close()
        sockets.close()
        return figures


# -- an owner that many follow


def stand_in_followers(endpoint: str, followers: int, parent: Connection) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, followers + 16)
    poller = zmq.Poller()
    known: dict[zmq.Socket[bytes], int] = {}
    for _ in range(followers):
        one = context.socket(zmq.DEALER)
        one.connect(endpoint)
        one.send(b"12345678" + encode(Follow(0)))
        poller.register(one, zmq.POLLIN)
        known[one] = 0
    parent.send("ready")
    while not parent.poll():
        for one, _ in poller.poll(10):
            _, raw = split(one.recv())
            known[one] = answered(raw)
            one.send(b"12345678" + encode(Follow(known[one])))
    parent.send(min(known.values()))
    context.destroy(linger=0)


def answered(raw: bytes | memoryview) -> int:
    """The number of the next change, of an answer."""
    answer = decode_answer(raw)
    assert isinstance(answer, Changes), answer
    return answer.number


def owner(followers: int, changes_per_s: float, seconds: float) -> dict[str, float]:
    """A real `Service`, whose owner has changes and no memory."""
    log = ChangeLog(KEYS_KEPT)

    class Announcing:
        def __init__(self) -> None:
            self.card = SimpleNamespace(epoch=1)
            self.announcers: list[Callable[[], None]] = []

        @property
        def changes(self) -> int:
            return len(log)

        def since(self, number: int, limit: int) -> Records | None:
            return log.since(number, limit)

        def tick(self) -> None:
            """No memory, nothing to do."""

    announcing: Any = Announcing()
    sockets = Sockets()
    with tempfile.TemporaryDirectory(prefix="kv") as directory, both_ends() as (mine, theirs):
        service = Service(announcing, sockets, f"ipc://{directory}/owner")
        process = get_context("spawn").Process(
            target=stand_in_followers, args=(service.endpoint, followers, theirs)
        )
        process.start()
        mine.recv()
        time.sleep(2.0)
        each = max(int(changes_per_s * STEP_S), 1)
        cpu_before_s, begin_s = cpu_s(), time.monotonic()
        while (now_s := time.monotonic()) < begin_s + seconds:
            log.append(records(len(log), each))
            for announcer in announcing.announcers:
                announcer()
            time.sleep(max(STEP_S - (time.monotonic() - now_s), 0.0))
        wall_s, used_s, made = time.monotonic() - begin_s, cpu_s() - cpu_before_s, len(log)
        mine.send("stop")
        slowest = mine.recv()
        process.join()
        service.close()
        sockets.close()
    return {
        "changes_per_s": made / wall_s,
        "cpu_s_per_s": used_s / wall_s,
        "slowest_follower_behind_s": (made - slowest) / (made / wall_s),
    }


# -- the index


def index(owners: int, seconds: float) -> dict[str, float]:
    """Renewals as `kvstore.membership.index_redis` makes them, one by one over one connection."""
    with redis_server() as server:
        script = server.register_script(SCRIPT)

        def exchange(_: str, entry: bytes, known: bytes) -> Told:
            answer = script(keys=KEYS, args=[FORGOTTEN_S, entry, known, 0])
            return answer[0], answer[1] if len(answer) == 2 else None

        return renewed(exchange, lambda: redis_cpu_s(server), owners, seconds)


def registry(owners: int, seconds: float) -> dict[str, float]:
    """As ``index``: each renewal is a request that is proved, and so is its answer."""
    with both_ends() as (mine, theirs):
        process = get_context("spawn").Process(target=serve_registry, args=(theirs,))
        process.start()
        there = RegistryIndex(f"registry://127.0.0.1:{mine.recv()}", 10.0, 3600.0, REGISTRY_KEYS)

        def used_s() -> float:
            mine.send("how much?")
            return float(mine.recv())

        found = renewed(there.exchange, used_s, owners, seconds)
        there.close()
        mine.send("")
        process.join()
    return found


def renewed(
    exchange: Callable[[str, bytes, bytes], Told],
    used_s: Callable[[], float],
    owners: int,
    seconds: float,
) -> dict[str, float]:
    """What an index takes. ``used_s``: its processor time until now."""
    entries = [
        (f"{number:032x}", f"{number:032x} {0:016x} tcp://10.0.0.1:{number}".encode())
        for number in range(owners)
    ]
    version = b""
    for name, entry in entries:
        version = exchange(name, entry, version)[0]
    renewals, before_s, begin_s = 0, used_s(), time.monotonic()
    while time.monotonic() < begin_s + seconds:
        for name, entry in entries:
            assert exchange(name, entry, version)[1] is None, "nothing has changed"
        renewals += owners
    each_s = (used_s() - before_s) / renewals
    before_s, lists = used_s(), min(owners, 200)
    for _ in range(lists):
        found = exchange(*entries[0], b"")[1]
        assert found is not None
        assert len(found) == owners
    list_s = (used_s() - before_s) / lists
    return {
        "renewal_us": 1e6 * each_s,
        "cpu_s_per_s": owners * each_s,
        "list_us": 1e6 * list_s,
        "cpu_s_for_each_new_owner": owners * list_s,
    }


def serve_registry(theirs: Connection) -> None:
    with BootstrapServer("127.0.0.1", 0, keys=REGISTRY_KEYS) as server:
        theirs.send(server.port)
        while theirs.recv():
            theirs.send(cpu_s())


@contextmanager
def redis_server() -> Iterator[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kv") as directory:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
        process = subprocess.Popen(
            [*command, "--dir", directory], stdout=subprocess.DEVNULL, process_group=0
        )
        try:
            with redis.Redis(port=port) as server:
                wait_for(lambda: answers(server))
                yield server
        finally:
            process.kill()
            process.wait()


def answers(server: Any) -> bool:
    try:
        return bool(server.ping())
    except redis.ConnectionError:
        return False


def redis_cpu_s(server: Any) -> float:
    used = server.info("cpu")
    return float(used["used_cpu_sys"]) + float(used["used_cpu_user"])


# -- what all parts need


@contextmanager
def both_ends() -> Iterator[tuple[Connection, Connection]]:
    mine, theirs = get_context("spawn").Pipe()
    with mine, theirs:
        yield mine, theirs


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_clock_of(name: str) -> Callable[[], float]:
    """Processor time of one thread of this process."""
    (ident,) = (one.ident for one in threading.enumerate() if one.name == name)
    assert ident is not None
    clock = time.pthread_getcpuclockid(ident)
    return lambda: time.clock_gettime(clock)


def wait_for(is_so: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"store_scale: the cluster did not start within {timeout_s:g} s")
        time.sleep(0.05)


def main(options: argparse.Namespace) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    owners, seconds = options.owners, options.seconds
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "table": lambda: table(owners, options.objects),
        "client": lambda: client(owners, options.changes, seconds),
        "owner": lambda: owner(owners, options.changes, seconds),
        "index": lambda: index(owners, seconds),
        "registry": lambda: registry(owners, seconds),
    }
    figures = {name: parts[name]() for name in options.parts.split(",")}
    print(json.dumps({"owners": owners, "cores": os.cpu_count(), **figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(OPTIONS))
