# SPDX-License-Identifier: Apache-2.0
"""A Redis server that a test may kill, and stores that meet there."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from cpu_serving.ports import PortBlock
from rdma_testbed.packages import ensure_programs
from store_makers import settings, until

from bootstrap_server.admission.secret import Keys
from kvstore.config import Config
from kvstore.membership.index_redis import KEYS as OWNERS

SECRET = b"0123456789abcdef-of-hosts-in-tests-of-the-store"
KEYS = Keys.from_secrets([SECRET])


class RedisServer:
    """It keeps nothing on disk: one that is started again has lost all."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        """``host``: the address that it listens on."""
        ensure_programs({"redis-server": "redis-server"}, "the store's tests with an index")
        # One that the kernel gives out may be another process's before Redis listens there.
        self._ports = PortBlock()
        self.port = self._ports.first
        self._host = host
        self.url = f"redis://{host}:{self.port}/0"
        self._directory = tempfile.TemporaryDirectory(prefix="kv")
        self._log = Path(self._directory.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", self._host]
        command += ["--protected-mode", "no"]  # Which refuses others than the loopback.
        command += ["--save", "", "--appendonly", "no", "--dir", self._directory.name]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        until(self._answers, "Redis answers")

    def kill(self) -> None:
        """kill -9; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def write(self, entry: bytes) -> None:
        """Puts an entry into the owners' list, as a stranger may."""
        client = self.client()
        client.zadd(OWNERS[0], {entry: client.time()[0]})
        client.close()

    def client(self) -> Any:
        return redis.Redis.from_url(self.url)

    def _answers(self) -> bool:
        assert self._process is not None
        status = self._process.poll()
        assert status is None, f"Redis ended with {status}: {self._log.read_text()[-2000:]}"
        client = self.client()
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
        finally:
            client.close()

    def close(self) -> None:
        self.kill()
        self._directory.cleanup()
        self._ports.close()


@contextmanager
def redis_server(host: str = "127.0.0.1") -> Iterator[RedisServer]:
    """One that runs."""
    server = RedisServer(host)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def meeting() -> Iterator[dict[str, Any]]:
    """Settings of hosts that meet at an index of their own."""
    with redis_server() as server:
        yield {"index": server.url, "keys": KEYS}


def at_index(url: str, memory: int = 0, keys: Keys = KEYS, **more: Any) -> Config:
    return Config(index=url, keys=keys, memory=memory, **settings(**more))
