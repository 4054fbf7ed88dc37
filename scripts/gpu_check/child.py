# SPDX-License-Identifier: Apache-2.0
"""Where the process of a step begins."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

__all__ = ["Failed", "Skipped", "Task", "die_with_parent", "main"]

PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """What was to hold does not; the message says what."""


class Skipped(Exception):
    """It cannot be run on this machine; the message says what it needs."""


class Task:
    """What a step is told, and how it tells what it does."""

    def __init__(self, answers: int, request: dict[str, Any]) -> None:
        self._answers = answers
        self.python: str = request["python"]
        self.scale: float = request["scale"]
        self.peers: list[str] = [one for one in request["peers"].split(",") if one]
        self.peers_python: str = request["peers_python"]
        self.deadline_s: float = request["deadline_s"]

    def scaled(self, number: float, least: int = 1) -> int:
        """So much of the work."""
        return max(least, round(number * self.scale))

    def doing(self, what: str) -> None:
        """For the result of a step that does not come back from it."""
        self.tell({"doing": what})

    def tell(self, told: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(told).encode() + b"\n")


def die_with_parent() -> None:
    """Whatever hangs in this process, the kernel ends it with the one that started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Runs the function that the request names: what it returns are the fields of a `Result`."""
    die_with_parent()
    request = json.loads(sys.argv[2])
    task = Task(int(sys.argv[1]), request)
    task.tell({"end": _end(task, request)})


def _end(task: Task, request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["function"].partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        return {"state": "passed", **function(task, **request["arguments"])}
    except Skipped as exc:
        return {"state": "skipped", "reason": str(exc)}
    except Failed as exc:
        return {"state": "failed", "reason": str(exc)}
    except Exception as exc:  # noqa: BLE001 - any failure of a step is its result
        traceback.print_exc()
        place = traceback.extract_tb(exc.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"  # noqa: PTH119
        return {"state": "failed", "reason": f"{type(exc).__name__}: {exc} ({where})"}
