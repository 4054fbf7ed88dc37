# SPDX-License-Identifier: Apache-2.0
"""Stores that are measured: each with the processes that it needs, and one client.

The client puts from registered memory and gets into it, by the fastest calls that each has for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import te
from kvstore.config import Config
from kvstore.host.place import Place
from kvstore.objects.changes import Keys, keys_of_hex
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.objects.signature import Signature
from kvstore.store import Store
from te.checkout import CHECKOUT

__all__ = ["CONTENDERS", "Absent", "Contender", "Objects", "await_end", "names_of"]

START_TIMEOUT_S: Final = 30.0
HOST: Final = "127.0.0.1"
FAR_HOST: Final = "127.0.0.2"
GETTING_HOST: Final = "127.0.0.3"
MOONCAKES: Final = CHECKOUT / "build/peers/mooncake"
"""Where ``scripts/setup peer mooncake`` puts it: the project's environment must not have it."""


class Absent(Exception):
    """The peer is not installed; the text says what is missing."""


@dataclass(frozen=True)
class Objects:
    """Some objects of one size, and the client's memory for them."""

    #: Digests in hex, as SGLang has them.
    names: Sequence[str]
    #: Shape (objects, bytes).
    memory: npt.NDArray[np.uint8]

    @property
    def addresses(self) -> list[int]:
        """Where each begins."""
        start, step = self.memory.ctypes.data, self.memory.strides[0]
        return [start + i * step for i in range(len(self.names))]

    @property
    def nbytes(self) -> int:
        """Of each."""
        return int(self.memory.shape[1])


class Contender:
    """One store. ``memory``: all that objects lie in; ``lent``: bytes that it must hold."""

    name: ClassVar[str]
    #: Of the objects that ``exists`` asks for, in bytes.
    size = 4096

    def __init__(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        self.undo = contextlib.ExitStack()
        self.folder = Path(self.undo.enter_context(tempfile.TemporaryDirectory(prefix="kv")))
        with contextlib.ExitStack() as failed:
            failed.callback(self.undo.close)
            self.open(memory, lent)
            failed.pop_all()

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        """Starts it; ``Absent``."""
        raise NotImplementedError

    def put(self, objects: Objects) -> int:
        """How many were stored."""
        raise NotImplementedError

    def get(self, objects: Objects) -> int:
        """How many came."""
        raise NotImplementedError

    def exists(self, names: Sequence[str]) -> int:
        """How many there are."""
        raise NotImplementedError

    def remove(self, names: Sequence[str]) -> None:
        """Makes room; is not measured."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends its processes."""
        self.undo.close()

    def start_module(self, name: str, *arguments: str) -> None:
        """One of this folder's, which says "ready"."""
        self.start([sys.executable, "-m", name, *arguments], "ready", PYTHONPATH=_path())

    def start_redis(self, *settings: str) -> int:
        """Its port; ``Absent``."""
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server is None:
            raise Absent("neither redis-server nor valkey-server is installed")
        if importlib.util.find_spec("redis") is None:
            raise Absent("the Python package redis is not installed")
        port = _free_port()
        quiet = ["--save", "", "--appendonly", "no", "--bind", HOST, "--dir", str(self.folder)]
        self.start([server, "--port", str(port), *settings, *quiet])
        _await_port(port)
        return port

    def start(self, command: Sequence[str], ready: str | None = None, **more: str) -> None:
        """A process that ends with the contender; waits for a line that begins with ``ready``."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if ready else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
            env=os.environ | more,
        )
        self.undo.callback(_end, process)
        if ready and process.stdout is not None:
            line = process.stdout.readline()
            if not line.startswith(ready):
                raise RuntimeError(f"{command[0]} said {line!r} instead of {ready!r}")


class Ours(Contender):
    """A store, whose memory the owner of this host has in a process of its own."""

    name: ClassVar = "ours"

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        """See ``Contender``."""
        engine = te.Config(status_dir=None)
        self.use(Config(memory=lent, directory=self.folder / "s", linger_s=0.0, engine=engine))
        self._store.register(memory)

    def use(self, config: Config) -> None:
        """A client with these settings; the owner ends behind it."""
        self._store = self._getting = self.client(config)
        self._signature = Signature(
            weights="bench", dtype="-", page_size=1, layers=(0, 0), heads=(0, 0), layout="bench/1"
        ).digest

    def client(self, config: Config) -> Store:
        """One with these settings, until the contender is closed; its owner ends behind it."""
        self.undo.callback(await_end, config.directory)
        return self.undo.enter_context(Store(config))

    def put(self, objects: Objects) -> int:
        """See ``Contender``."""
        return self._store.put(keys_of(objects.names), self._signature, _pieces(objects)).count(
            Put.STORED
        )

    def get(self, objects: Objects) -> int:
        """See ``Contender``."""
        return self._getting.get(keys_of(objects.names), self._signature, _pieces(objects)).count(
            Got.RIGHT
        )

    def exists(self, names: Sequence[str]) -> int:
        """See ``Contender``."""
        return int(self._getting.exists(keys_of(names), self._signature, self.size).sum())

    def remove(self, names: Sequence[str]) -> None:
        """See ``Contender``."""
        self._store.remove(keys_of(names), self._signature)


class OursTcp(Ours):
    """Two hosts that lend no memory, of which one puts and the other gets, and one that lends, over
    TCP. They meet at Redis. What is put has passed the memory of its host, and would be got from
    there."""

    name: ClassVar = "ours tcp"

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        """See ``Contender``."""
        index, secret = f"redis://{HOST}:{self.start_redis()}", self.folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        where = [f"--index={index}", f"--secret-file={secret}", "--transports=tcp"]
        where += [f"--directory={self.folder / 'far'}", f"--host={FAR_HOST}"]
        command = [sys.executable, "-m", "kvstore", "serve", f"--memory={lent}", *where]
        self.start(command, "kvstore: lends", PYTHONPATH=_path())
        engine = te.Config(transports=("tcp",), status_dir=None)
        of_all = {"linger_s": 0.0, "index": index, "secret_file": str(secret)}
        puts = Config.of(of_all | {"directory": str(self.folder / "s"), "host": HOST})
        gets = Config.of(of_all | {"directory": str(self.folder / "g"), "host": GETTING_HOST})
        self.use(replace(puts, engine=engine))
        self._getting = self.client(replace(gets, engine=engine))
        for one in (self._store, self._getting):
            one.register(memory)
        _await(
            lambda: self._store.lenders and self._getting.lenders,
            "no owner of another host is found",
        )


class Mooncake(Contender):
    """Mooncake Store over TCP: a master, a process that lends memory, and a client."""

    name: ClassVar = "mooncake"
    ENVIRONMENT: ClassVar[dict[str, str]] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        """See ``Contender``."""
        os.environ.update(self.ENVIRONMENT)  # Mooncake reads them when it starts.
        if importlib.util.find_spec("mooncake") is None:
            sys.path.append(str(MOONCAKES))
        try:
            module: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise Absent(
                f"mooncake.store cannot be imported ({error}): scripts/setup peer mooncake"
                " installs it"
            ) from error
        master = Path(module.__file__).with_name("mooncake_master")
        port = _free_port()
        self.start([str(master), f"--rpc_port={port}", f"--metrics_port={_free_port()}"])
        _await_port(port)
        arguments = [str(port), str(_free_port()), str(lent)]
        self.start_module("kvstore_tools.bench.lend_mooncake", *arguments)
        self._store = module.MooncakeDistributedStore()
        here = f"{HOST}:{_free_port()}"
        code = self._store.setup(here, "P2PHANDSHAKE", 0, 64 << 20, "tcp", "", f"{HOST}:{port}")
        if code:
            raise RuntimeError(f"setup returned {code}")
        self.undo.callback(self._store.close)
        if code := self._store.register_buffer(memory.ctypes.data, memory.nbytes):
            raise RuntimeError(f"register_buffer returned {code}")

    def put(self, objects: Objects) -> int:
        """See ``Contender``."""
        sizes = [objects.nbytes] * len(objects.names)
        codes = self._store.batch_put_from(list(objects.names), objects.addresses, sizes)
        return sum(one == 0 for one in codes)

    def get(self, objects: Objects) -> int:
        """See ``Contender``."""
        sizes = [objects.nbytes] * len(objects.names)
        codes = self._store.batch_get_into(list(objects.names), objects.addresses, sizes)
        return sum(one == objects.nbytes for one in codes)

    def exists(self, names: Sequence[str]) -> int:
        """See ``Contender``."""
        return sum(one == 1 for one in self._store.batch_is_exist(list(names)))

    def remove(self, names: Sequence[str]) -> None:
        """See ``Contender``. Leased objects are left until their lease has ended."""
        for one in names:
            self._store.remove(one)


class Redis(Contender):
    """Redis over TCP with hiredis, pipelined; it makes copies of what it sends and receives."""

    name: ClassVar = "redis"

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:  # noqa: ARG002
        """See ``Contender``."""
        port = self.start_redis("--maxmemory", str(lent), "--maxmemory-policy", "allkeys-lru")
        module: Any = importlib.import_module("redis")
        self._redis = module.Redis(host=HOST, port=port)
        self.undo.callback(self._redis.close)

    def put(self, objects: Objects) -> int:
        """See ``Contender``."""
        pairs = zip(objects.names, objects.memory, strict=True)
        with self._redis.pipeline(transaction=False) as pipe:
            for name, row in pairs:
                pipe.set(name, memoryview(row))
            return sum(map(bool, pipe.execute()))

    def get(self, objects: Objects) -> int:
        """See ``Contender``."""
        count = 0
        found = self._redis.mget(objects.names)
        for value, row in zip(found, objects.memory, strict=True):
            if value is not None:
                row[:] = np.frombuffer(value, np.uint8)
                count += 1
        return count

    def exists(self, names: Sequence[str]) -> int:
        """See ``Contender``."""
        return int(self._redis.exists(*names))

    def remove(self, names: Sequence[str]) -> None:
        """See ``Contender``."""
        self._redis.delete(*names)


CONTENDERS: Final[dict[str, tuple[type[Contender], ...]]] = {
    "ours": (Ours, OursTcp),
    "mooncake": (Mooncake,),
    "redis": (Redis,),
}
"""By the names of ``--peers``."""


def keys_of(names: Sequence[str]) -> Keys:
    """As the linker makes them of SGLang's page keys."""
    return keys_of_hex(names)


def names_of(count: int, seed: int) -> list[str]:
    """New names for objects."""
    return [hashlib.sha256(b"%d %d" % (seed, i)).hexdigest() for i in range(count)]


def _pieces(objects: Objects) -> Pieces:
    return Pieces.whole(objects.addresses, objects.nbytes)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _path() -> str:
    more = filter(None, [os.environ.get("PYTHONPATH"), str(MOONCAKES)])
    return os.pathsep.join([str(CHECKOUT), *more])


def _await_port(port: int) -> None:
    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1.0):
            return True
        return False

    _await(answers, f"nobody listens at port {port}")


def await_end(directory: Path) -> None:
    """Waits until the owner of a store has ended, which nobody uses any more."""

    def has_ended() -> bool:
        lock = Place(directory).lock()
        if lock is not None:
            lock.close()
        return lock is not None

    _await(has_ended, "the owner of the store does not end")


def _await(condition: Callable[[], object], late: str) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{late} within {START_TIMEOUT_S:g} s")
        time.sleep(0.05)
