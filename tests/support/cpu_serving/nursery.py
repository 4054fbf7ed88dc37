# SPDX-License-Identifier: Apache-2.0
"""Servers and routers forked from a process that has imported SGLang, or vLLM.

Of the 23 CPU-seconds that a server of SGLang takes to start 21 are imports, in each of its
processes; of vLLM's 20 half of them. A nursery has done them once; what is forked from it goes on
from there. Everything else is as after ``python -m MODULE``: arguments, environment, a session and
a log of its own, plugins.
The processes that SGLang spawns are forked, too, each from an image in which nothing has run yet
but imports, and handed what multiprocessing would hand to a new interpreter.

What is read of the environment at the imports is the nursery's: `fits` says which servers may come
from here.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from multiprocessing import spawn, util
from pathlib import Path
from typing import Any, Self

__all__ = ["ForkedProcess", "Nursery"]

PRELOAD = (
    "sglang.launch_server",
    "sglang_router.launch_router",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    # What the plugin imports, half a second in each process.
    "sglang_mooncake.sglang.plugin",
    "sglang_mooncake.sglang.manager",
    "sglang_mooncake.sglang.receiver",
    "sglang_mooncake.sglang.registry",
    "sglang_mooncake.sglang.sender",
    # Behind all that its hooks are looked for in.
    "cpu_serving.hooked",
)
#: Names, or their beginnings, of variables that nothing reads before a server runs.
READ_LATER = (
    "CPU_SERVING_",
    "MOONCAKE_",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "PYTEST_",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_DISAGGREGATION_HEARTBEAT_",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
    "SGLANG_ENABLE_WAR_BARRIER",
    "SGLANG_HOST_IP",
    "SGLANG_MOONCAKE_",
    "SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB",
)
PATH = "PYTHONPATH"
MESSAGE_BYTES = 1 << 17
MAX_FDS = 64
# Above what a process of SGLang's has open as it spawns another.
HIGH_FD = 512
START_TIMEOUT_S = 500.0
END_TIMEOUT_S = 10.0
_NETWORK = Path("/proc/thread-self/ns/net")
POLL_S = 0.02

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_GROUPS = "/sys/fs/cgroup"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class ForkedProcess:
    """As much of `subprocess.Popen` as a caller of `Nursery.start` needs."""

    def __init__(self, name: str, pid: int) -> None:
        self._name = name
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        """The exit status; subprocess.TimeoutExpired."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self._name, timeout_s or 0.0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Sends it unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """A process that has imported SGLang, or what it is told, with one environment."""

    def __init__(
        self,
        env: Mapping[str, str],
        log: Path,
        *,
        python: str | Path = sys.executable,
        preload: Sequence[str] = PRELOAD,
        read_later: Sequence[str] = READ_LATER,
    ) -> None:
        """
        Args:
            python: The interpreter of the servers.
            preload: Modules to import.
            read_later: Names, or their beginnings, of variables in which a server may differ.
        """
        self._env = dict(env)
        self._packages = {name.partition(".")[0] for name in preload}
        self._read_later = tuple(read_later)
        # What is forked becomes this process's child once the one between them has ended.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._network = _NETWORK.stat().st_ino
        self._socket, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far, log.open("wb") as out:
            self._process = subprocess.Popen(
                [
                    *(python, "-m", "cpu_serving.nursery"),
                    *(str(far.fileno()), str(os.getpid()), *preload),
                ],
                env={**self._env, PATH: _python_path(self._env)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=[far.fileno()],
                start_new_session=True,
            )
        self._log = log

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fits(self, env: Mapping[str, str]) -> bool:
        """Whether a server with this environment may be forked here. It may have more folders on
        its path, if there is nothing in them that is imported here."""
        names = {n for n in {*env, *self._env} if env.get(n) != self._env.get(n)} - {PATH}
        mine, its = _folders(self._env), _folders(env)
        more = [Path(one) for one in its if one not in mine]
        return (
            all(name.startswith(self._read_later) for name in names)
            and [one for one in its if one in mine] == mine
            and not any((one / name).exists() for one in more for name in self._packages)
        )

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path
    ) -> ForkedProcess:
        """What ``python -m module`` would start with these arguments, in a session of its own, in
        the network namespace, which its /sys shows, and on the cores of the calling thread.

        The first one waits until all is imported. Raises RuntimeError if that failed.
        """
        with log.open("wb") as out, _NETWORK.open("rb") as network:
            message = {
                "module": module,
                "arguments": list(arguments),
                "env": dict(env),
                "parent": os.getpid(),
                "cores": sorted(os.sched_getaffinity(0)),
            }
            fds = [out.fileno()]
            if os.fstat(network.fileno()).st_ino != self._network:  # entering one needs rights
                fds.append(network.fileno())
            self._socket.settimeout(START_TIMEOUT_S)
            try:
                return ForkedProcess(module, _ask(self._socket, message, fds))
            except OSError as error:
                said = self._log.read_text(errors="replace")[-4000:]
                raise RuntimeError(f"the nursery of servers failed: {error!r}\n{said}") from error


def _folders(env: Mapping[str, str]) -> list[str]:
    return [os.path.abspath(one) for one in env.get(PATH, "").split(os.pathsep) if one]  # noqa: PTH100 - as Python does


def _python_path(env: Mapping[str, str]) -> str:
    """Where this module is found, too."""
    return os.pathsep.join([*_folders(env), str(Path(__file__).parents[1])])


def _ask(template: socket.socket, message: Mapping[str, Any], fds: Sequence[int]) -> int:
    """The process id of what a template has forked; OSError."""
    socket.send_fds(template, [json.dumps(message).encode()], list(fds))
    answer = template.recv(MESSAGE_BYTES)
    if not answer:
        raise EOFError("it has ended")
    return int(answer)


def _serve(requests: socket.socket) -> Callable[[], object]:
    """The loop of a template, which forks and does nothing else. Returns what to do in a child."""
    while True:
        data, fds, _flags, _address = socket.recv_fds(requests, MESSAGE_BYTES, MAX_FDS)
        if not data:
            os._exit(0)
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            child = os.fork()
            if not child:
                os.close(reader)
                os.close(writer)
                requests.close()
                return _born(json.loads(data), fds)
            os.write(writer, str(child).encode())
            os._exit(0)
        os.waitpid(between, 0)
        os.close(writer)
        requests.send(os.read(reader, 32))
        for fd in (reader, *fds):
            os.close(fd)


def _born(message: Mapping[str, Any], fds: Sequence[int]) -> Callable[[], object]:
    """In a child: its parent, environment and files, and a template for its own children.

    Returns what to do in it, or in a child of that template.
    """
    while os.getppid() != message["parent"]:
        if os.getppid() == 1:
            os._exit(1)
        time.sleep(0.001)
    os.environ.clear()
    os.environ.update(message["env"])
    _find_in([one for one in _folders(os.environ) if one not in sys.path])
    # Out of the way of the numbers that they shall have.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    if "module" in message:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.sched_setaffinity(0, message["cores"])
        if len(high) > 1:
            _enter_host(high[1])
        for number in (1, 2):
            os.dup2(high[0], number)
    template, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        template.close()
        for fd in high:
            os.close(fd)
        return _serve(far)
    far.close()
    _fork_what_is_spawned(template)
    if "module" in message:
        for fd in high:
            os.close(fd)
        return functools.partial(_run_module, message["module"], message["arguments"])
    for fd, number in zip(high, message["numbers"], strict=True):
        os.dup2(fd, number)
        os.set_inheritable(number, False)
        os.close(fd)
    return functools.partial(_run_spawned, message["spawned"])


def _find_in(more: Sequence[str]) -> None:
    """Folders that the nursery has not on its path come first. What Python runs as it starts is run
    if it lies there; the nursery has run the others'."""
    others, sys.path[:] = sys.path[:], more
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    sys.path[:] = [*more, *others]


def _enter_host(network: int) -> None:
    """A network namespace, and a /sys that shows its interfaces: UCX looks for them there. Control
    groups stay where they are."""
    if _libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")
    if _libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no namespace of mounts can be made")
    groups = os.open(_GROUPS, os.O_PATH)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("sysfs", "/sys", "sysfs", 0)
    _mount(f"/proc/self/fd/{groups}", _GROUPS, None, _MS_BIND | _MS_REC)
    os.close(groups)


def _mount(source: str | None, at: str, kind: str | None, flags: int) -> None:
    words = (None if one is None else one.encode() for one in (source, at, kind))
    if _libc.mount(*words, flags, None):
        raise OSError(ctypes.get_errno(), f"mount {source or ''} at {at}")


def _fork_what_is_spawned(template: socket.socket) -> None:
    """Has multiprocessing's method "spawn" fork from the template.

    multiprocessing hands descriptors over by number and the rest through one of them, to a command
    line that names it; other programs, as its resource tracker, are started as ever.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ordinary = util.spawnv_passfds
    high = socket.socket(fileno=fcntl.fcntl(template.detach(), fcntl.F_DUPFD_CLOEXEC, HIGH_FD))
    one_at_a_time = threading.Lock()

    def start(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if not spawn.is_forking(["", args[-1]]):
            return ordinary(path, args, passfds)
        handles = dict(re.findall(r"(\w+)=(\d+)", str(args[-2])))
        message = {
            "spawned": {name: int(number) for name, number in handles.items()},
            "numbers": list(passfds),
            "env": dict(os.environ),
            "parent": os.getpid(),
        }
        with one_at_a_time:
            return _ask(high, message, passfds)

    util.spawnv_passfds = start


def _run_module(module: str, arguments: Sequence[str]) -> None:
    _apply_shim()
    sys.modules.pop(module, None)  # to be run as a program
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _run_spawned(handles: Mapping[str, int]) -> None:
    _apply_shim()
    sys.argv = ["-c", "--multiprocessing-fork"]
    spawn.spawn_main(**handles)


def _apply_shim() -> None:
    """What the shim does as torch is imported depends on the environment, which is another here."""
    importlib.import_module("sitecustomize").stand_in_for_a_gpu()


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        raise OSError(f"prctl({option}, {value}) failed")


def _main(fd: int, parent: int, preload: Sequence[str]) -> Callable[[], object]:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted a nursery has ended")
    for name in preload:
        importlib.import_module(name)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        sys.exit(f"{threads} threads run after the imports: nothing can be forked safely")
    gc.collect()
    gc.freeze()  # else collections in the children write to every page
    return _serve(socket.socket(fileno=fd))


if __name__ == "__main__":
    # Out here nothing of the nursery is left on the stack of what it forks.
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])()
