# SPDX-License-Identifier: Apache-2.0
"""Prefill instances as a decode rank knows them: one look-up per registry address at a time, in a
worker, so that SGLang's scheduler never waits for a registry."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bootstrap_server import BootstrapClient, BootstrapError, Instance

__all__ = ["PrefillInfo", "PrefillInstances"]

logger = logging.getLogger(__name__)

#: Clients name registry addresses, so what is kept of bad ones must be bounded.
PROBLEMS_MAX = 1_024
#: A registry whose instance lacks ranks answers when they come, or after this long: shorter than
#: the 15 s for which SGLang's scheduler goes on asking us, so that we can say who was missing.
LOOKUP_WAIT_S = 3.0
_WORKERS = 8


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What SGLang's decode scheduler reads of a prefill instance (`prefill_info_table`)."""

    dp_size: int
    follow_bootstrap_room: bool
    prefill_http_port: int | None


def fetch_instance(address: str) -> Instance:
    """The instance behind the registry at `address`; takes up to `LOOKUP_WAIT_S` longer than a
    request does while ranks are missing.

    Raises:
        BootstrapError: a sentence that says why it is not known.
    """
    client = BootstrapClient(address)
    try:
        return client.instance(wait_s=LOOKUP_WAIT_S)
    finally:
        client.close()


class PrefillInstances:
    """Which prefill instances are known, why others are not, and what is being looked up, all by
    the address of their registry. Any thread may call; no call waits."""

    def __init__(self, fetch: Callable[[str], Instance] = fetch_instance) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()  # held for a few dictionary accesses
        self._known: dict[str, Instance] = {}
        self._problems: dict[str, str] = {}
        self._fetching: set[str] = set()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="kv-lookup")
        #: Read by SGLang's decode scheduler; an address is in it once its instance is known.
        self.infos: dict[str, PrefillInfo] = {}

    def ensure(self, address: str) -> bool:
        """Whether the instance behind this registry is known; if not, has it looked up."""
        if address in self.infos:
            return True
        with self._lock:
            if address not in self._fetching:
                self._fetching.add(address)
                self._workers.submit(self._look_up, address)
        return False

    def get(self, address: str) -> Instance | None:
        return self._known.get(address)

    def problem(self, address: str) -> str | None:
        """Why the instance is not known; None when no look-up has failed."""
        return self._problems.get(address)

    def forget(self, address: str) -> None:
        """A rank of it may have been restarted elsewhere: the next `ensure` looks it up afresh."""
        with self._lock:
            self._known.pop(address, None)
            self.infos.pop(address, None)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _look_up(self, address: str) -> None:
        try:
            result: Instance | str = self._fetch(address)
        except BootstrapError as error:
            result = str(error)
        except Exception as error:
            logger.exception("the look-up of the prefill instance at %s failed", address)
            result = f"internal error in the look-up: {error!r}"
        with self._lock:
            self._fetching.discard(address)
            self._problems.pop(address, None)
            if isinstance(result, Instance):
                self._known[address] = result
                self.infos[address] = PrefillInfo(
                    dp_size=result.config.topology.dp_size,
                    follow_bootstrap_room=result.config.follow_bootstrap_room,
                    prefill_http_port=result.ranks[0].prefill_http_port,
                )
                return
            if len(self._problems) >= PROBLEMS_MAX:
                del self._problems[next(iter(self._problems))]
            self._problems[address] = result
