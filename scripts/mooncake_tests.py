# SPDX-License-Identifier: Apache-2.0
"""Runs Mooncake's own tests of its transfer engine over te, once with each transport.

They are not part of this repository: FOLDER is a checkout of Mooncake, or the folder of it that has
the file. A second process has the engine that the tests copy to. Exit status 1 if a test fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from command_line import positive, some_of
from tests_of_others import folder_of, parser_of

FILE: Final = "transfer_engine_initiator_test.py"
PLACES: Final = ("", "mooncake-wheel/tests")
"""Where the file is, below the folder."""

HOST: Final = "127.0.0.1"
P2P: Final = "P2PHANDSHAKE"
BUFFER_BYTES: Final = 64 << 20
START_TIMEOUT_S: Final = 120.0
TESTS_TIMEOUT_S: Final = 1800.0
END_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class Outcome:
    """What unittest counted."""

    ran: int
    bad: int
    skipped: int

    @property
    def is_good(self) -> bool:
        return self.ran > self.skipped and not self.bad


def protocol_of(transport: str) -> str:
    """Mooncake's name; its ``rdma`` leaves the choice to te, which here has no other transport."""
    return "tcp" if transport == "tcp" else "rdma"


def take_te(transport: str) -> None:
    """From now on ``mooncake.engine`` in this process is te with this transport alone."""
    from sglang_mooncake.sglang.config import Config
    from sglang_mooncake.sglang.drop_in import install

    install(Config.from_environment({"SGLANG_MOONCAKE_TRANSPORTS": transport}))


def be_target(transport: str, pipe: Connection) -> None:
    """Sends the session of an engine with memory, and stays until the pipe is closed."""
    take_te(transport)
    engine = importlib.import_module("mooncake.engine").TransferEngine()
    if engine.initialize(HOST, P2P, protocol_of(transport), "") != 0:
        raise SystemExit(1)  # The log says why.
    if engine.allocate_managed_buffer(BUFFER_BYTES) == 0:
        raise SystemExit(1)
    pipe.send(f"{HOST}:{engine.get_rpc_port()}")
    pipe.poll(None)


def be_initiator(transport: str, pipe: Connection, path: Path, session: str, rounds: int) -> None:
    """Runs the tests in the file, and sends their outcome."""
    take_te(transport)
    # What the tests read their settings from.
    os.environ |= {
        "TARGET_SERVER_NAME": session,
        "INITIATOR_SERVER_NAME": f"{HOST}:0",
        "MC_METADATA_SERVER": P2P,
        "PROTOCOL": protocol_of(transport),
        "CIRCLE": str(rounds),
    }
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(stream=sys.stderr, verbosity=2).run(suite)
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    pipe.send(Outcome(result.testsRun, bad, len(result.skipped)))


class Started:
    """A process that sends one thing back."""

    def __init__(self, work: Callable[..., None], transport: str, *arguments: object) -> None:
        context = get_context("spawn")
        self._near, far = context.Pipe()
        self._process = context.Process(target=work, args=(transport, far, *arguments), daemon=True)
        self._process.start()
        far.close()

    def answer(self, timeout_s: float) -> Any:
        """What it sends. ``SystemExit`` if it ends without, or takes too long."""
        if not self._near.poll(timeout_s):
            raise SystemExit(f"mooncake_tests: a process has not answered within {timeout_s:g} s")
        try:
            return self._near.recv()
        except EOFError:
            raise SystemExit("mooncake_tests: a process ended; it has said why above") from None

    def end(self) -> None:
        """Idempotent."""
        self._near.close()
        self._process.join(END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def run(transport: str, path: Path, rounds: int) -> Outcome:
    """All tests, with one transport."""
    target = Started(be_target, transport)
    try:
        session = target.answer(START_TIMEOUT_S)
        initiator = Started(be_initiator, transport, path, session, rounds)
        try:
            outcome: Outcome = initiator.answer(TESTS_TIMEOUT_S)
        finally:
            initiator.end()
    finally:
        target.end()
    return outcome


def main() -> int:
    parser = parser_of(__file__, __doc__)
    parser.add_argument(
        "--transports",
        type=some_of(("samehost", "rdma", "tcp")),
        default=("samehost", "tcp"),
        metavar="LIST",
        help="some of samehost,rdma,tcp (samehost,tcp)",
    )
    parser.add_argument("--rounds", type=positive, default=1000, metavar="N", help="(1000)")
    options = parser.parse_args()
    path = folder_of(parser, options.folder, "Mooncake's", [FILE], PLACES) / FILE
    rounds = math.ceil(options.rounds)
    outcomes = {one: run(one, path, rounds) for one in options.transports}
    for transport, outcome in outcomes.items():
        good = outcome.ran - outcome.bad - outcome.skipped
        print(f"{transport}: {good} of {outcome.ran} tests of {FILE} passed")
    return 0 if all(one.is_good for one in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
