# SPDX-License-Identifier: Apache-2.0
"""An etcd server that a test may kill, and whatever index a test is to be run with."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cpu_serving.ports import PortBlock
from rdma_testbed.packages import ensure_programs
from store_makers import TIMEOUT_S, until
from store_redis import RedisServer, redis_server
from store_registry import RegistryServer, registry_server

from kvstore.membership.index_etcd import PREFIX

HOST = "127.0.0.1"
INDEXES = ("redis", "etcd", "etcd that keeps nothing")
#: Where nobody writes without a proof, too.
ALL_INDEXES = (*INDEXES, "registry")


class EtcdServer:
    """One member."""

    def __init__(self, keeps: bool) -> None:
        """``keeps``: whether one that is started again has what it had before."""
        ensure_programs({"etcd": "etcd-server"}, "the store's tests with etcd")
        self._keeps = keeps
        # Those that the kernel gives out may be another process's before etcd listens there.
        self._ports = PortBlock()
        self.port, self._peer_port = self._ports.first, self._ports.first + 1
        self.url = f"etcd://{HOST}:{self.port}"
        self._directory = tempfile.TemporaryDirectory(prefix="kv")
        self._log = Path(self._directory.name) / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        data = Path(self._directory.name) / "data"
        if not self._keeps:
            shutil.rmtree(data, ignore_errors=True)
        clients, peers = (f"http://{HOST}:{port}" for port in (self.port, self._peer_port))
        command = ["etcd", "--data-dir", str(data), "--listen-client-urls", clients]
        command += ["--advertise-client-urls", clients, "--listen-peer-urls", peers]
        command += ["--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"default={peers}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
        until(self._answers, "etcd answers")

    def kill(self) -> None:
        """kill -9; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def write(self, entry: bytes) -> None:
        """Puts an entry into the owners' list, as a stranger may."""
        self.ask("kv/put", key=_text(PREFIX + hashlib.sha256(entry).digest()), value=_text(entry))

    def ask(self, what: str, **question: Any) -> dict[str, Any]:
        """Raises ``OSError``."""
        url = f"http://{HOST}:{self.port}/v3/{what}"
        with urllib.request.urlopen(
            url, json.dumps(question).encode(), timeout=TIMEOUT_S
        ) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def _answers(self) -> bool:
        assert self._process is not None
        status = self._process.poll()
        assert status is None, f"etcd ended with {status}: {self._log.read_text()[-2000:]}"
        try:
            return bool(self.ask("kv/range", key=_text(b"x")))
        except OSError:
            return False

    def close(self) -> None:
        self.kill()
        self._directory.cleanup()
        self._ports.close()


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@contextmanager
def etcd_server(keeps: bool = True) -> Iterator[EtcdServer]:
    """One that runs."""
    server = EtcdServer(keeps)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextmanager
def any_index(kind: str) -> Iterator[RedisServer | EtcdServer | RegistryServer]:
    """One of ``ALL_INDEXES``, which runs."""
    with registry_server() if kind == "registry" else index_server(kind) as server:
        yield server


@contextmanager
def index_server(kind: str) -> Iterator[RedisServer | EtcdServer]:
    """One of ``INDEXES``, which runs."""
    made = redis_server() if kind == "redis" else etcd_server(kind == "etcd")
    with made as server:
        yield server
