# SPDX-License-Identifier: Apache-2.0
"""What scenarios are made of: servers on a store, owners, clients, and answers that are known."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec
from cpu_serving.processes import ManagedProcess, ServingError
from cpu_serving.progress import Step
from cpu_serving.servers import (
    Fleet,
    Pair,
    Router,
    Server,
    ServerOptions,
    base_environment,
    wait_ready,
)
from cpu_serving.store import with_store
from cpu_serving.store_figures import SlowRank, figures_in, total, watched
from cpu_serving.store_status import statuses
from cpu_serving.traffic import Request, make_requests, send_all

from kvstore.client.status import StoreStatus
from kvstore.serving import LABEL
from soak_run.clients import Clients
from soak_run.probe import BEGUN, Spec
from soak_run.results import Asked, End, Known, Probed, Row, Span, ends

__all__ = ["Bench", "Place", "Tally", "until"]

#: Requests and their tokens: more than a server's own cache holds, so that it takes pages out of
#: the store all the time.
REQUESTS: Final = 32
PROMPT_TOKENS_MAX: Final = 480
CACHE_TOKENS: Final = 4096
PAGE: Final = 16
WAIT_S: Final = 120.0
POLL_S: Final = 0.05


def until(condition: Callable[[], Any], what: str) -> None:
    """Waits for it. Raises ServingError."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise ServingError(f"has not happened within {WAIT_S:.0f} s: {what}")
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Place:
    """Where the files of a scenario's store are; its path is short, as those of sockets must be."""

    path: Path

    @property
    def directory(self) -> Path:
        return self.path / "s"

    @property
    def figures(self) -> Path:
        return self.path / "figures"

    @property
    def status(self) -> Path:
        return self.path / "te"

    def usable_owners(self, server: Server) -> int:
        """By a server's ranks, the least of them."""
        group = server.process.pid
        found = [one for one in statuses(self.status) if os.getpgid(one.pid) == group]
        return min((sum(owner.usable for owner in one.owners) for one in found), default=0)

    def started(self) -> list[StoreStatus]:
        """The owners that servers have started, as they are now: there is one, or none."""
        return [one for one in statuses(self.status) if one.label == LABEL]

    def started_owner(self) -> tuple[int, int]:
        """Of the owner that the servers have started: its process, and its objects. Raises
        ServingError if there is none."""
        found: list[tuple[int, int]] = []

        def is_there() -> bool:
            found[:] = [(one.pid, one.own.objects) for one in self.started() if one.own is not None]
            return bool(found)

        until(is_there, "there is an owner that a server has started")
        return found[0]

    def other_hosts(self) -> int:
        """How many owners of other hosts can be used, as an owner knows them that a server has
        started; 0 without one."""
        usable = (sum(owner.usable for owner in one.owners) for one in self.started())
        return min(usable, default=0)

    def wait_for_end(self) -> None:
        """Of the owners that servers have started. Raises ServingError."""
        until(lambda: not self.started(), "the owner that a server has started has ended")

    def objects(self) -> int:
        """Of all owners that have a status socket here."""
        return sum(one.own.objects for one in statuses(self.status) if one.own is not None)


@dataclass
class Tally:
    """How the requests of a scenario have ended."""

    ends: list[End] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(
        self,
        asked: Sequence[Asked],
        known: Sequence[Known],
        spans: Sequence[Span],
    ) -> None:
        """See ``ends``."""
        found = ends(asked, known, spans)
        self.ends += found
        for one, end in zip(asked, found, strict=True):
            if end in ("503", "failed") and one.answer is not None and one.answer.error:
                self.errors.append(one.answer.error)


class Bench:
    """One for all scenarios of a run."""

    def __init__(
        self, fleet: Fleet, folder: Path, clients: int, deadline_s: float, seed: int
    ) -> None:
        """``folder``: see ``Place``."""
        self.fleet = fleet
        self.deadline_s, self.seed = deadline_s, seed
        self._folder, self._clients = folder, clients
        self._known: dict[tuple[Path, tuple[str, ...]], list[tuple[int, ...]]] = {}
        self._starts = 0
        self.requests = make_requests(REQUESTS, PROMPT_TOKENS_MAX, seed=seed)

    def place(self, name: str) -> Place:
        made = Place(self._folder / name)
        made.path.mkdir()
        return made

    # -- servers

    def known(
        self, model: Path, requests: Sequence[Request] = (), args: tuple[str, ...] = ()
    ) -> list[tuple[int, ...]]:
        """What a server without a store answers; by default to ``requests``. Raises
        ServingError."""
        key = model, (*args, *(str(one.fields) for one in requests))
        if key not in self._known:
            plain = ServerOptions(model, page_size=PAGE, extra_args=args)
            server = self.start(plain, "plain")
            answers = send_all(server.url, requests or self.requests, self._clients)
            server.stop()
            for one in answers:
                if one.error:
                    raise ServingError(f"the server without a store failed a request: {one.error}")
            self._known[key] = [one.output_ids for one in answers]
        return self._known[key]

    def options(
        self,
        place: Place,
        model: Path,
        memory: str,
        slow: SlowRank | None = None,
        args: tuple[str, ...] = (),
        **more: Any,
    ) -> ServerOptions:
        """Of a server on the store. Models are so small that it is never worth it to load their
        pages, so they are always loaded. ``more``: as `with_store`."""
        more.setdefault("admission", False)
        more.setdefault("linger_s", 0.0)  # The owner that a server has started ends with it.
        plain = ServerOptions(
            model,
            max_total_tokens=CACHE_TOKENS,
            extra_args=args,
            extra_env={"SGLANG_MOONCAKE_STATUS_DIR": str(place.status)},
        )
        return watched(with_store(plain, place.directory, memory, **more), place.figures, slow)

    def start(self, options: ServerOptions, name: str) -> Server:
        """Returns when it is ready."""
        with Step(f"starting the server {name!r}") as step:
            server = self.fleet.server("single", options, name=self._label(name))
            wait_ready([server], tick=step.tick)
        return server

    def pair(self, prefill: ServerOptions, decode: ServerOptions, name: str) -> Pair:
        """Behind the router. Returns when it is ready."""
        with Step(f"starting the pair {name!r}") as step:
            first, second = (
                self.fleet.server(role, options, name=self._label(f"{name}-{role}"))
                for role, options in (("prefill", prefill), ("decode", decode))
            )
            router = self.fleet.router(first, second, name=self._label(f"{name}-router"))
            pair = Pair(first, second, router)
            wait_ready([first, second, router], tick=step.tick)
        return pair

    def again(self, server: Server) -> Server:
        """One that has ended, at its ports. Returns when it is ready."""
        made = self.fleet.server(
            server.role,
            server.options,
            name=self._label(f"{server.role}-again"),
            port=server.port,
            bootstrap_port=server.bootstrap_port,
        )
        wait_ready([made])
        return made

    def owner(self, place: Place, *settings: str) -> ManagedProcess:
        """``kvstore serve``, for the servers of the place if the settings name no other directory.
        Returns when it lends."""
        name = self._label("owner")
        argv = ["kvstore", "serve", "--memory=32MiB", f"--directory={place.directory}", *settings]
        env = base_environment() | {"XDG_RUNTIME_DIR": str(place.path)}
        process = self._process(name, argv, env)
        until(lambda: "lends" in _said(process), f"the {name} lends its memory")
        return process

    def beside(self, name: str, *argv: str) -> ManagedProcess:
        """``python -m argv[0] argv[1:]``, a program of its own beside the servers."""
        return self._process(self._label(name), argv, base_environment())

    def _process(self, name: str, argv: Sequence[str], env: dict[str, str]) -> ManagedProcess:
        env = env | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return self.fleet.process(name, argv, env, self.fleet.run_dir / f"{name}.log")

    def _label(self, name: str) -> str:
        self._starts += 1
        return f"{name}-{self._starts}"

    # -- load

    @contextmanager
    def clients(
        self, server: Server | Router, requests: Sequence[Request] = ()
    ) -> Iterator[Clients]:
        """Ask the server meanwhile; by default `requests`. As this begins there have been as many
        answers as clients: the first ones of a new server took six seconds on a quiet machine, and
        what happens before them happens to a server that does nothing. Raises ServingError."""
        how = (self._clients, self.deadline_s, self.seed)
        with Clients(server.url, requests or self.requests, *how) as asking:
            until(lambda: _answers(server, asking) >= self._clients, "the clients have answers")
            yield asking

    def wait(self, server: Server | Pair, seconds: float) -> None:
        """Lets so much time pass. Raises ServingError if the server ends meanwhile, or one of the
        pair."""
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            _check_alive(server)
            time.sleep(min(left_s, POLL_S))

    def wait_for_loads(self, server: Server, place: Place, before: int = 0) -> None:
        """Until pages came out of the store, under load, beside those before. A server that has no
        time to ask for a prompt twice within the seconds of a scenario loads nothing. Raises
        ServingError."""
        until(lambda: _pages(server, place) > before, "pages came out of the store")

    @contextmanager
    def probe(
        self, settings: dict[str, Any], transports: tuple[str, ...], status: Path | None = None
    ) -> Iterator[list[Probed]]:
        """A client of the store beside the servers; what it has seen is in the list afterwards.
        ``status``: where status sockets are, if its own counts."""
        name = self._label("probe")
        spec = Spec(settings, transports, timeout_s=1.0, status_dir=status and str(status))
        argv = ["soak_run.probe", msgspec.json.encode(spec).decode()]
        process = self._process(name, argv, base_environment())
        until(lambda: BEGUN in _said(process), f"the {name} has stored its objects")
        found: list[Probed] = []
        yield found
        process.ask_to_end()
        if process.wait(WAIT_S):
            raise ServingError(f"the {name} failed\n{process.tail()}")
        found.append(msgspec.json.decode(process.log_text().splitlines()[-1], type=Probed))

    def row(
        self,
        scenario: str,
        place: Place,
        tally: Tally,
        probed: Probed | None = None,
        notes: Sequence[str] = (),
        **more: Any,
    ) -> Row:
        """Once all servers of the scenario have ended. ``more``: of ``Row``."""
        return Row(
            scenario,
            tally.seconds,
            tally.ends,
            total(figures_in(place.figures)),
            probed or Probed(),
            tally.errors,
            notes,
            **more,
        )


def _check_alive(server: Server | Router | Pair) -> None:
    """Raises ServingError."""
    for one in (server.prefill, server.decode) if isinstance(server, Pair) else (server,):
        one.process.check_alive()


def _answers(server: Server | Router, clients: Clients) -> int:
    _check_alive(server)
    return len(clients.asked)


def _pages(server: Server, place: Place) -> int:
    _check_alive(server)
    return total(figures_in(place.figures)).pages


def _said(process: ManagedProcess) -> str:
    process.check_alive()
    return process.log_text()
