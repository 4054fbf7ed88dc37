# SPDX-License-Identifier: Apache-2.0
"""Prefill instances as a decode rank knows them: one look-up per registry address at a time, in a
worker, so that SGLang's scheduler never waits for a registry."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bootstrap_server import (
    BootstrapError,
    Instance,
    MismatchError,
    NeverServed,
    Unreachable,
    Why,
    split_address,
)
from sglang_mooncake.fetching import fetch_instance
from sglang_mooncake.refused import Refused, RefusedServer
from sglang_mooncake.registries import Registries
from sglang_mooncake.workers import Workers

__all__ = ["KNOWN_MAX", "PrefillInfo", "PrefillInstances"]

logger = logging.getLogger(__name__)

#: Clients name registry addresses, so what is kept of them must be bounded.
PROBLEMS_MAX = 1_024
KNOWN_MAX = 1_024
#: Look-ups, with those under way.
WAITING_MAX = 1_024
#: A registry that does not answer holds a worker for 8 s: one host may hold a quarter of them.
WORKERS = 16
WORKERS_OF_ONE_HOST = 4
#: After that SGLang has given up the requests that a look-up was for.
WAITING_MAX_S = 15.0
#: An instance whose rank was lost is asked for beside all that, by workers of its own, until it is
#: there again or this long: a server with a large model starts for minutes. So is one that has
#: refused us, or does not fit us, for so long after the last request that named it.
RETURN_WORKERS = 2
RETURN_FIRST_S, RETURN_MAX_S = 0.1, 2.0
RETURN_GIVEN_UP_S = 900.0
#: A registry forgets who has died when its lease ends, after 15 s: whom it names then has lived on.
RETURN_NOT_DEAD_S = 20.0
REFUSED_AGAIN_S = 5.0
#: Where nothing listens on the port, a server may be starting: it is asked again for so long. A
#: prefill server opens its registry long before it takes requests.
NOTHING_LISTENS_S = 1.5


@dataclass(frozen=True, slots=True)
class PrefillInfo:
    """What SGLang's decode scheduler reads of a prefill instance (`prefill_info_table`)."""

    dp_size: int
    follow_bootstrap_room: bool
    prefill_http_port: int | None


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why a look-up failed. ``begun_s``: when it began. ``why``: on what the servers differ, if it
    would fail again until somebody changes that."""

    sentence: str
    begun_s: float
    why: Why | None = None
    nothing_listens: bool = False


@dataclass(slots=True, eq=False)
class _Return:
    """The wait for an instance to come back."""

    former: Instance
    not_dead_s: float
    next_s: float
    give_up_s: float
    pause_s: float = RETURN_FIRST_S
    at_work: bool = False


def _fits_always(instance: Instance) -> None:
    del instance


class PrefillInstances:
    """Which prefill instances are known, why others are not, and what is being looked up, all by
    the address of their registry. Any thread may call; no call waits.

    Args:
        fits: raises MismatchError for an instance that cannot serve this rank.
    """

    def __init__(
        self,
        registries: Registries,
        fetch: Callable[[str], Instance] = fetch_instance,
        clock: Callable[[], float] = time.monotonic,
        fits: Callable[[Instance], None] = _fits_always,
    ) -> None:
        self._registries, self._fetch, self._clock = registries, fetch, clock
        self._fits = fits
        self._lock = threading.Lock()  # held for a few dictionary accesses
        self._known: dict[str, Instance] = {}
        self._problems: dict[str, _Problem] = {}
        self._looked_up: set[str] = set()  # by a worker, or soon
        self._workers = Workers("kv-lookup", WORKERS, WAITING_MAX, WORKERS_OF_ONE_HOST, clock)
        self._returns: dict[str, _Return] = {}
        self._refused = Refused(REFUSED_AGAIN_S, RETURN_GIVEN_UP_S, frozenset(registries.exact))
        self._return_workers = ThreadPoolExecutor(RETURN_WORKERS, thread_name_prefix="kv-return")
        self._closed = False
        #: Read by SGLang's decode scheduler; an address is in it once its instance is known.
        self.infos: dict[str, PrefillInfo] = {}

    def refusal(self, address: str) -> str | None:
        """Why this registry is never asked; None when it may be."""
        try:
            host, port = split_address(address)
        except BootstrapError as error:
            return str(error)
        if self._registries.allows(host, port):
            return None
        allowed = ", ".join(self._registries.patterns)
        return (
            f"the request names the registry {address}, which {self._registries.setting} of this "
            f"decode server does not allow ({allowed})"
        )

    def ensure(self, address: str) -> bool:
        """Whether the instance behind this registry is known; if not, has it looked up."""
        self._refused.asked(address, self._clock())
        if address in self.infos:
            return True
        refusal = self.refusal(address)
        with self._lock:
            if refusal is not None:
                self._note_problem(address, _Problem(refusal, self._clock()))
            elif address not in self._looked_up and not self._closed:
                host, _ = split_address(address)
                if self._workers.submit(functools.partial(self._look_up, address), host):
                    self._looked_up.add(address)
                else:
                    sentence = (
                        f"{WAITING_MAX} look-ups of prefill instances are queued already, which "
                        "is the limit"
                    )
                    self._note_problem(address, _Problem(sentence, self._clock()))
        return False

    def looks_up(self, address: str) -> bool:
        """Whether an answer about it is still to come."""
        return address in self._looked_up

    def get(self, address: str) -> Instance | None:
        return self._known.get(address)

    def problem(self, address: str) -> str | None:
        """Why the instance is not known; None when no look-up has failed."""
        problem = self._problems.get(address)
        return None if problem is None else problem.sentence

    def verdict(self, address: str, since_s: float) -> str | None:
        """Why nobody needs to wait for this instance any longer, by look-ups that began after
        ``since_s`` (of this class's clock): the other side will never serve us as we are set, or
        nothing listens there. None while it may still be served."""
        problem = self._problems.get(address)
        if problem is None or problem.begun_s < since_s:
            return None
        if problem.nothing_listens and problem.begun_s >= since_s + NOTHING_LISTENS_S:
            return problem.sentence
        return problem.sentence if problem.why is not None else None

    def why(self, address: str) -> Why | None:
        """On what this server and that one differ, as far as one refuses the other."""
        return self._refused.why(address)

    def refused(self) -> tuple[RefusedServer, ...]:
        """The prefill servers that do not serve this rank, by their own word or by ours."""
        return self._refused.all()

    def refuse(self, address: str, instance: Instance, sentence: str, why: Why) -> None:
        """In this life, the instance and this rank do not serve each other."""
        with self._lock:
            self._note_refused(address, sentence, why, instance)

    def forget(self, address: str) -> None:
        """A rank of it may have been restarted elsewhere: the next `ensure` looks it up afresh.
        Once the registry tells of another life, it is known before anybody asks; until then its
        word may be that of a rank whose lease has not ended yet."""
        with self._lock:
            former = self._known.pop(address, None)
            self.infos.pop(address, None)
            if former is not None:
                if len(self._returns) >= KNOWN_MAX:
                    del self._returns[next(iter(self._returns))]
                now_s = self._clock()
                self._returns[address] = _Return(
                    former, now_s + RETURN_NOT_DEAD_S, now_s, now_s + RETURN_GIVEN_UP_S
                )

    @property
    def returning(self) -> int:
        """How many instances are expected to come back."""
        return len(self._returns)

    def tick(self) -> None:
        """Asks for instances that are to come back, or have refused us, where that is due."""
        if not self._returns and not self._refused:
            return
        now_s = self._clock()
        with self._lock:
            for address in self._refused.due(now_s):
                if not self._at_return(self._look_again, address):
                    return
            for address, one in list(self._returns.items()):
                if now_s >= one.give_up_s:
                    del self._returns[address]
                elif now_s >= one.next_s and not one.at_work:
                    if not self._at_return(self._look_for_return, address, one):
                        return
                    one.at_work = True

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._workers.close()
        self._return_workers.shutdown(wait=False, cancel_futures=True)

    # --- under the lock ---

    def _at_return(self, call: Callable[..., None], *arguments: object) -> bool:
        """Has a call made by the workers that look again; False once this is closed."""
        if not self._closed:
            try:
                self._return_workers.submit(call, *arguments)
            except RuntimeError:  # The interpreter ends, and its executors before us.
                self._closed = True
        return not self._closed

    def _note_refused(
        self, address: str, sentence: str, why: Why, instance: Instance | None = None
    ) -> None:
        one = RefusedServer(address, why, sentence, time.time())
        if self._refused.note(one, instance, self._clock()):
            # Once, and before the first request has failed of it.
            logger.error("prefill instance at %s: %s", address, sentence)

    def _note_problem(self, address: str, problem: _Problem) -> None:
        self._problems.pop(address, None)
        if problem.why is not None:
            self._note_refused(address, problem.sentence, problem.why)
        if len(self._problems) >= PROBLEMS_MAX:
            del self._problems[next(iter(self._problems))]
        self._problems[address] = problem

    def _note_known(self, address: str, instance: Instance, misfit: _Problem | None) -> None:
        self._problems.pop(address, None)
        if misfit is not None and misfit.why is not None:
            # It is known all the same: its ranks are to be told of requests that they have.
            self._note_refused(address, misfit.sentence, misfit.why, instance)
        elif self._refused.clear(address, instance):
            logger.warning("prefill instance at %s serves this server now", address)
        returning = self._returns.get(address)
        if returning is not None and returning.former != instance:
            del self._returns[address]  # else the registry has only not noticed yet
        known = {other: one for other, one in self._known.items() if other != address}
        if len(known) >= KNOWN_MAX:
            oldest = next(iter(known))
            del known[oldest], self.infos[oldest]
        # At once, as its readers take no lock.
        self._known = known | {address: instance}
        self.infos[address] = PrefillInfo(
            dp_size=instance.config.topology.dp_size,
            follow_bootstrap_room=instance.config.follow_bootstrap_room,
            prefill_http_port=instance.ranks[0].prefill_http_port,
        )

    # --- in a worker ---

    def _ask(self, address: str) -> tuple[Instance | None, _Problem | None]:
        """The instance, and why it is not known, or does not fit."""
        begun_s, instance = self._clock(), None
        try:
            instance = self._fetch(address)
            self._fits(instance)
            return instance, None
        except MismatchError as error:
            return instance, _Problem(str(error), begun_s, error.why)
        except Unreachable as error:
            return None, _Problem(str(error), begun_s, nothing_listens=error.nothing_listens)
        except BootstrapError as error:
            why = error.why if isinstance(error, NeverServed) else None
            return None, _Problem(str(error), begun_s, why)
        except Exception as error:
            logger.exception("the look-up of the prefill instance at %s failed", address)
            return None, _Problem(f"internal error in the look-up: {error!r}", begun_s)

    def _look_for_return(self, address: str, one: _Return) -> None:
        found, misfit = self._ask(address)
        with self._lock:
            one.at_work = False
            one.next_s = self._clock() + one.pause_s
            one.pause_s = min(2 * one.pause_s, RETURN_MAX_S)
            is_expected = self._returns.get(address) is one
            if not is_expected or found is None:
                return
            if found != one.former:
                self._note_known(address, found, misfit)
            elif self._clock() >= one.not_dead_s:
                del self._returns[address]

    def _look_again(self, address: str) -> None:
        """At one that has refused us."""
        found, problem = self._ask(address)
        with self._lock:
            if not self._refused.looked(address, self._clock()):
                return  # Or nobody would forget it who asks late enough.
            if found is not None:
                self._note_known(address, found, problem)
            elif problem is not None and problem.why is not None:
                # Whatever else goes wrong meanwhile is for requests to find out.
                self._note_problem(address, problem)

    def _look_up(self, address: str, waited_s: float) -> None:
        instance, problem = None, None
        if waited_s < WAITING_MAX_S:
            instance, problem = self._ask(address)
        else:
            problem = _Problem(
                f"its look-up waited {WAITING_MAX_S:g} s behind those of other prefill instances",
                self._clock(),
            )
        with self._lock:
            if instance is not None:
                self._note_known(address, instance, problem)
            elif problem is not None:
                self._note_problem(address, problem)
            # Last: who sees that no answer is to come must see the answer.
            self._looked_up.discard(address)
