# SPDX-License-Identifier: Apache-2.0
"""Stores that are measured: each with the processes that it needs, and one client.

The client puts from registered memory and gets into it, by the fastest calls that each has for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

import te
from kvstore.config import Config
from kvstore.objects.changes import Keys, keys_of_hex
from kvstore.objects.outcomes import Got, Put
from kvstore.objects.pieces import Pieces
from kvstore.objects.signature import Signature
from kvstore.store import Store
from te.checkout import CHECKOUT

__all__ = ["CONTENDERS", "Absent", "Contender", "Objects", "names_of"]

START_TIMEOUT_S: Final = 30.0
HOST: Final = "127.0.0.1"


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
        path = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.start([sys.executable, "-m", name, *arguments], "ready", PYTHONPATH=path)

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
    """A store whose memory another process lends, on the same host."""

    name: ClassVar = "ours"
    transports: ClassVar[tuple[str, ...]] = te.config.TRANSPORTS
    is_own: ClassVar = False

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        """See ``Contender``."""
        lender = Config(
            owner="rank",
            memory=lent,
            directory=self.folder / "s",
            engine=te.Config(transports=self.transports, status_dir=None),
        )
        if not self.is_own:
            arguments = [str(lender.directory), str(lent), *self.transports]
            self.start_module("kvstore_tools.bench.lend", *arguments)
        config = lender if self.is_own else lender.lending_nothing
        self._store = self.undo.enter_context(Store(config))
        self._store.register(memory)
        self._signature = Signature(
            weights="bench", dtype="-", page_size=1, layers=(0, 0), heads=(0, 0), layout="bench/1"
        ).digest
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not any(one.usable for one in self._store.status().owners) and not self.is_own:
            if time.monotonic() > deadline_s:
                raise RuntimeError("the lending process was not found")
            time.sleep(0.05)

    def put(self, objects: Objects) -> int:
        """See ``Contender``."""
        return self._store.put(keys_of(objects.names), self._signature, _pieces(objects)).count(
            Put.STORED
        )

    def get(self, objects: Objects) -> int:
        """See ``Contender``."""
        return self._store.get(keys_of(objects.names), self._signature, _pieces(objects)).count(
            Got.RIGHT
        )

    def exists(self, names: Sequence[str]) -> int:
        """See ``Contender``."""
        return int(self._store.exists(keys_of(names), self._signature, self.size).sum())

    def remove(self, names: Sequence[str]) -> None:
        """See ``Contender``."""
        self._store.remove(keys_of(names), self._signature)


class OursTcp(Ours):
    """The same over TCP."""

    name: ClassVar = "ours tcp"
    transports: ClassVar[tuple[str, ...]] = ("tcp",)


class OursLocal(Ours):
    """Memory of the client's own process."""

    name: ClassVar = "ours local"
    is_own: ClassVar = True


class Mooncake(Contender):
    """Mooncake Store over TCP: a master, a process that lends memory, and a client."""

    name: ClassVar = "mooncake"
    ENVIRONMENT: ClassVar[dict[str, str]] = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "3"}

    def open(self, memory: npt.NDArray[np.uint8], lent: int) -> None:
        """See ``Contender``."""
        os.environ.update(self.ENVIRONMENT)  # Mooncake reads them when it starts.
        master = shutil.which("mooncake_master") or Path(sys.executable).with_name(
            "mooncake_master"
        )
        try:
            module: Any = importlib.import_module("mooncake.store")
        except ImportError as error:
            raise Absent(f"mooncake.store cannot be imported: {error}") from error
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
        server = shutil.which("redis-server") or shutil.which("valkey-server")
        if server is None:
            raise Absent("neither redis-server nor valkey-server is installed")
        try:
            module: Any = importlib.import_module("redis")
        except ImportError as error:
            raise Absent(f"redis cannot be imported: {error}") from error
        port = _free_port()
        limits = ["--maxmemory", str(lent), "--maxmemory-policy", "allkeys-lru"]
        quiet = ["--save", "", "--appendonly", "no", "--bind", HOST, "--dir", str(self.folder)]
        self.start([server, "--port", str(port), *limits, *quiet])
        _await_port(port)
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
    "ours": (Ours, OursTcp, OursLocal),
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


def _await_port(port: int) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with socket.create_connection((HOST, port), 1.0):
                return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)
