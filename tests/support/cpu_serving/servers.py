# SPDX-License-Identifier: Apache-2.0
"""SGLang servers and routers on the CPU: command lines, environment, readiness."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal, Protocol, Self
from urllib.parse import urlsplit

from cpu_serving.cuda import PretendedCuda
from cpu_serving.layerwise import Layerwise
from cpu_serving.nursery import Nursery
from cpu_serving.overlap import Overlap
from cpu_serving.ports import HOST, PortBlock
from cpu_serving.processes import ManagedProcess, ServingError, signals_deferred
from cpu_serving.progress import no_tick

__all__ = [
    "HOST",
    "RESTING",
    "SHIM",
    "Fleet",
    "Pair",
    "Role",
    "Router",
    "RouterKind",
    "Server",
    "ServerOptions",
    "answers_at",
    "base_environment",
    "wait_ready",
    "with_secret",
]

Role = Literal["single", "prefill", "decode"]
RouterKind = Literal["mini-lb", "sglang-router", "ours"]

SHIM = Path(__file__).parent / "shim"
#: Of servers that leave the processor to others while they wait (`shim/cpu_waits.py`).
RESTING = {"CPU_SERVING_REST": "1"}
# Of backends for CPUs, SGLang's for AMX alone has what speculative decoding needs; the shim has its
# kernels. As the two sides' choice, as SGLang takes back the one for all without AMX.
MTP_FLAGS = {
    "--speculative-algorithm": "NEXTN",
    "--speculative-num-steps": 3,
    "--speculative-eagle-topk": 1,
    "--speculative-num-draft-tokens": 4,
    "--prefill-attention-backend": "intel_amx",
    "--decode-attention-backend": "intel_amx",
}
# A pair starts in about 25 s on two idle cores; a loaded machine may need many times that.
READY_TIMEOUT_S = 400.0 if len(os.sched_getaffinity(0)) > 1 else 1200.0
POLL_S = 0.2
# A server that generates a token for it says so after 1 s at the earliest.
HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerOptions:
    """How one server is laid out; the defaults hold 32 requests of 1,500 prompt tokens."""

    model: Path
    tp: int = 1
    pp: int = 1
    dp_attention: bool = False
    #: Speculative decoding with the model's own draft layer.
    mtp: bool = False
    page_size: int = 1
    chunked_prefill_size: int | None = None
    max_total_tokens: int = 65_536
    max_running_requests: int = 64
    extra_args: tuple[str, ...] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)
    #: The address of all that the server and its hand-overs listen on.
    host: str = HOST
    #: With overlap scheduling on a prefill server, warm-up and health requests, on a stand-in for a
    #: GPU's streams.
    overlap: Overlap | None = None
    #: The KV pool is said to be CUDA memory.
    cuda: PretendedCuda | None = None
    #: A prefill server sends layers while it computes others.
    layerwise: Layerwise | None = None

    @property
    def ranks(self) -> int:
        """Scheduler processes."""
        return self.tp * self.pp


def with_secret(options: ServerOptions, path: Path) -> ServerOptions:
    """The options of a server that has the deployment's secrets from this file."""
    extra_env = {**options.extra_env, "SGLANG_MOONCAKE_SECRET_FILE": str(path)}
    return replace(options, extra_env=extra_env)


class Waiting(Protocol):
    """Whatever can be waited for."""

    @property
    def process(self) -> ManagedProcess: ...

    def ready(self) -> bool: ...


class Server:
    """One SGLang server: its process, where it listens, where its ranks write their figures."""

    def __init__(
        self,
        role: Role,
        options: ServerOptions,
        run_dir: Path,
        port: int,
        bootstrap_port: int | None = None,
        name: str | None = None,
        nursery: Nursery | None = None,
    ) -> None:
        self.role = role
        self.options = options
        self.port = port
        self.url = f"http://{options.host}:{port}"
        self.bootstrap_port = bootstrap_port or port + 1
        self.stats_dir = run_dir / f"stats-{name or role}"
        self.stats_dir.mkdir(parents=True)
        argv = ["sglang.launch_server", *self._flags()]
        log = run_dir / f"{name or role}.log"
        self.process = ManagedProcess(
            f"{name or role} server", argv, self._environment(), log, nursery
        )

    def ready(self) -> bool:
        """Whether the server answers; raises ServingError when it has ended."""
        self.process.check_alive()
        return answers_at(f"{self.url}/health")

    def stop(self) -> None:
        self.process.stop()

    def _flags(self) -> list[str]:
        options = self.options
        flags = {
            "--model-path": options.model,
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--host": options.host,
            "--port": self.port,
            "--dtype": "float32",
            "--max-total-tokens": options.max_total_tokens,
            "--max-running-requests": options.max_running_requests,
            "--mem-fraction-static": 0.3,
            "--tp-size": options.tp,
            "--pp-size": options.pp,
            "--page-size": options.page_size,
            "--grammar-backend": "none",
        }
        if options.dp_attention:
            flags["--dp-size"] = options.tp
        if options.chunked_prefill_size is not None:
            flags["--chunked-prefill-size"] = options.chunked_prefill_size
        if options.mtp:
            flags |= MTP_FLAGS
        switches = ["--disable-cuda-graph", "--sleep-on-idle"]
        if options.overlap is None:
            switches.append("--skip-server-warmup")
        if options.dp_attention:
            switches.append("--enable-dp-attention")
        if self.role != "single":
            flags["--disaggregation-mode"] = self.role
            flags["--disaggregation-transfer-backend"] = "mooncake"
            flags["--disaggregation-bootstrap-port"] = self.bootstrap_port
        if self.role == "prefill" and options.overlap is None:
            # With overlap a prefix hit makes SGLang's prefill loop create a CUDA event.
            switches.append("--disable-overlap-schedule")
        if self.role == "decode":
            # SGLang's default pins host memory through the CUDA runtime.
            flags["--disaggregation-decode-retraction-backup"] = "cpu_tensor"
            if options.dp_attention:
                # On by default for decode, and without a CPU implementation.
                switches.append("--no-enable-tp-lm-head-all-to-all")
        pairs = [str(part) for item in flags.items() for part in item]
        return [*pairs, *switches, *options.extra_args]

    def _environment(self) -> dict[str, str]:
        env = base_environment() | {"SGLANG_HOST_IP": self.options.host}
        env["SGLANG_MOONCAKE_STATS_DIR"] = str(self.stats_dir)
        if self.options.ranks > 1:
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[rank % len(cores)]) for rank in range(self.options.ranks)
            )
        if self.options.overlap is not None:
            env |= self.options.overlap.environment(self.role, self.stats_dir)
        if self.options.layerwise is not None:
            has_streams = self.options.overlap is not None
            env |= self.options.layerwise.environment(
                self.role, self.stats_dir, has_streams=has_streams
            )
        if self.options.cuda is not None:
            env |= self.options.cuda.environment(self.stats_dir)
        return env | dict(self.options.extra_env)


class Router:
    """SGLang's mini-lb, its router in Rust, or ours, in front of prefill and decode servers."""

    def __init__(
        self,
        prefill: Sequence[Server],
        decode: Sequence[Server],
        run_dir: Path,
        port: int,
        name: str = "router",
        kind: RouterKind = "mini-lb",
        metrics_port: int | None = None,
        nursery: Nursery | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        argv = ["sglang_router.launch_router"]
        if kind == "ours":
            # A nursery has what SGLang needs. This starts as a program in less time.
            argv, nursery = ["sglang_mooncake.sglang.cli", "router"], None
        argv += ["--pd-disaggregation", "--host", HOST, "--port", str(port)]
        if kind == "mini-lb":
            argv += ["--mini-lb"]
        if metrics_port is not None:
            argv += ["--prometheus-port", str(metrics_port)]
        for server in prefill:
            argv += ["--prefill", server.url, str(server.bootstrap_port)]
        for server in decode:
            argv += ["--decode", server.url]
        argv += extra_args
        self.process = ManagedProcess(
            name, argv, base_environment(), run_dir / f"{name}.log", nursery
        )

    def ready(self) -> bool:
        self.process.check_alive()
        return answers_at(f"{self.url}/health")

    def stop(self) -> None:
        self.process.stop()


@dataclass(frozen=True)
class Pair:
    """Prefill and decode behind the router."""

    prefill: Server
    decode: Server
    router: Router

    def wait_ready(self) -> None:
        wait_ready([self.prefill, self.decode, self.router])


class Fleet:
    """Everything started for one run; all of it is ended when the context is left."""

    def __init__(self, run_dir: Path, nursery: Nursery | None = None) -> None:
        """Servers that fit it are forked from the `nursery`, all others start as programs."""
        self.run_dir = run_dir
        self._nursery = nursery
        self._ports: list[PortBlock] = []
        self._started: list[ManagedProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def server(
        self,
        role: Role,
        options: ServerOptions,
        *,
        name: str | None = None,
        port: int | None = None,
        bootstrap_port: int | None = None,
    ) -> Server:
        """Start one; `name` tells several of one role apart, ports are picked unless given."""
        port = port or self.port()
        with signals_deferred():
            server = Server(role, options, self.run_dir, port, bootstrap_port, name, self._nursery)
            self._started.append(server.process)
        return server

    def again(self, server: Server) -> Server:
        """Start a server that has ended once more, at its ports."""
        return self.server(
            server.role,
            server.options,
            name=f"{server.role}-again",
            port=server.port,
            bootstrap_port=server.bootstrap_port,
        )

    def router(
        self,
        prefill: Server | Sequence[Server],
        decode: Server | Sequence[Server],
        *,
        name: str = "router",
        kind: RouterKind = "mini-lb",
        extra_args: Sequence[str] = (),
    ) -> Router:
        with signals_deferred():
            metrics_port = self.port() if kind == "sglang-router" else None
            router = Router(
                [prefill] if isinstance(prefill, Server) else prefill,
                [decode] if isinstance(decode, Server) else decode,
                self.run_dir,
                self.port(),
                name,
                kind,
                metrics_port,
                self._nursery,
                extra_args,
            )
            self._started.append(router.process)
        return router

    def process(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        python: str | Path = sys.executable,
        *,
        is_server: bool = False,
    ) -> ManagedProcess:
        """Start ``python -m argv[0] argv[1:]``, whatever that is. A server is forked if it fits."""
        nursery = self._nursery if is_server else None
        with signals_deferred():
            self._started.append(ManagedProcess(name, argv, env, log, nursery, python))
        return self._started[-1]

    def pair(
        self, prefill: ServerOptions, decode: ServerOptions, router: RouterKind = "mini-lb"
    ) -> Pair:
        first = self.server("prefill", prefill)
        second = self.server("decode", decode)
        return Pair(first, second, self.router(first, second, kind=router))

    def stop(self) -> None:
        with signals_deferred():
            for process in self._started:
                process.ask_to_end()  # all at once: each takes seconds
            while self._started:
                self._started.pop().stop()
            while self._ports:
                self._ports.pop().close()

    def port(self) -> int:
        """Of a free block, which nobody else gets."""
        self._ports.append(PortBlock())
        return self._ports[-1].first


def wait_ready(
    waiting: Iterable[Waiting],
    *,
    timeout_s: float = READY_TIMEOUT_S,
    tick: Callable[[str], None] = no_tick,
) -> None:
    """Return when all answer. Raises ServingError, with the log's tail, if one dies or is late."""
    pending = list(waiting)
    deadline = time.monotonic() + timeout_s
    while pending:
        pending = [server for server in pending if not server.ready()]
        names = ", ".join(server.process.name for server in pending)
        if pending and time.monotonic() > deadline:
            late = pending[0].process
            raise ServingError(f"not ready after {timeout_s:.0f} s: {names}\n{late.tail()}")
        tick(f"waiting for: {names}")
        time.sleep(POLL_S)


def base_environment() -> dict[str, str]:
    """What every server and router has."""
    env = dict(os.environ)
    inherited = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{SHIM}:{inherited}" if inherited else str(SHIM)
    return env | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": HOST,  # hand-overs stay on the loopback interface, like the servers
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request compiles for half a minute
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "PYTHONUNBUFFERED": "1",
        # A server whose scheduler crashed would otherwise linger for more than a minute.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }


def answers_at(url: str) -> bool:
    """Whether a GET of it succeeds."""
    # Not by requests: urllib3 leaves finalizers behind, and an interrupt that comes in one is lost.
    where = urlsplit(url)
    connection = HTTPConnection(where.netloc, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", where.path)
        return connection.getresponse().status == HTTPStatus.OK
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
