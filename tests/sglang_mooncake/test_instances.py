# SPDX-License-Identifier: Apache-2.0
"""Look-ups of prefill instances: bounded, fair, and each comes to an end."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from handover import ALONE, FIRST, NEVER_S, WAIT_S, until

from bootstrap_server import (
    BootstrapClient,
    BootstrapError,
    BootstrapServer,
    Instance,
    InstanceConfig,
    KVFormat,
    MismatchError,
    Rank,
    RankLease,
    RankRecord,
    Unreachable,
    Why,
    instance_name_of,
)
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.signatures import signed
from sglang_mooncake import instances
from sglang_mooncake.fetching import LOOKUP_WAIT_S, fetch_instance
from sglang_mooncake.instances import PrefillInstances
from sglang_mooncake.registries import Registries

HOST_A, HOST_B = "10.0.0.1", "10.0.0.2"


def instance(port: int = 1) -> Instance:
    config = InstanceConfig(topology=ALONE, format=KVFormat(1, "bfloat16", None))
    return Instance(config, 1, (Rank(FIRST, "127.0.0.1", port),))


class Gate:
    """A `fetch` whose calls wait until they are let go."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.free = threading.Semaphore(0)

    def __call__(self, address: str) -> Instance:
        self.began.append(address)
        assert self.free.acquire(timeout=60)
        return instance()


@contextmanager
def lookups(fetch, registries: Registries | None = None, clock=lambda: 0.0) -> Iterator:
    with closing(PrefillInstances(registries or Registries(), fetch, clock)) as found:
        yield found


@pytest.mark.parametrize(
    "address", ["", "no-port", "host:0", "host:99999", "a b:1", "[::1:1", "ho\udcffst:1"]
)
def test_a_malformed_address_is_refused_and_not_looked_up_for_ever(address):
    with closing(PrefillInstances(Registries())) as known:
        for _ in range(2):
            assert not known.ensure(address)
            until(lambda: known.problem(address), "the problem is known")
            until(lambda: not known.looks_up(address), "its look-up is over")


def test_an_answer_is_there_before_its_look_up_is_over(caplog: pytest.LogCaptureFixture) -> None:
    """The log's line of an instance that does not fit is written between the two: whoever looks
    then must not find that nothing is known, and nothing to come."""
    address = f"{HOST_A}:8998"
    seen = []

    def misfit(_: Instance) -> None:
        raise MismatchError("page_size is 1", Why.PAGE_SIZE)

    def look(_: logging.LogRecord) -> bool:
        seen.append(known.looks_up(address) or known.get(address) is not None)
        return True

    with closing(PrefillInstances(Registries(), lambda _: instance(), fits=misfit)) as known:
        caplog.handler.addFilter(look)
        known.ensure(address)
        until(lambda: known.get(address) and not known.looks_up(address), "it is known")
        caplog.handler.removeFilter(look)
    assert seen == [True]


def test_a_registry_that_the_list_does_not_name_is_not_asked():
    gate = Gate()
    with lookups(gate, Registries((HOST_A,), "THE_LIST")) as known:
        assert not known.ensure(f"{HOST_B}:8998")
        assert "which THE_LIST of this decode server" in str(known.problem(f"{HOST_B}:8998"))
        assert known.refusal(f"{HOST_A}:8998") is None
        known.ensure(f"{HOST_A}:8998")
        until(lambda: gate.began == [f"{HOST_A}:8998"], "the allowed one is asked")
        gate.free.release()


def test_an_instance_that_is_known_is_not_looked_up_again():
    """So nobody waits for a registry that has ceased to answer."""
    gate, address = Gate(), f"{HOST_A}:8998"
    with lookups(gate) as known:
        gate.free.release()
        until(lambda: known.ensure(address), "it is known")
        assert [known.ensure(address) for _ in range(3)] == [True] * 3
        assert not known.looks_up(address)
    assert gate.began == [address]


def test_registries_of_one_host_do_not_hold_those_of_others():
    gate = Gate()
    with lookups(gate) as known:
        slow = [f"{HOST_A}:{port}" for port in range(1, 2 * instances.WORKERS)]
        for address in slow:
            known.ensure(address)
        known.ensure(f"{HOST_B}:8998")
        until(lambda: len(gate.began) > instances.WORKERS_OF_ONE_HOST, "they are asked")
        assert f"{HOST_B}:8998" in gate.began
        assert len(gate.began) == instances.WORKERS_OF_ONE_HOST + 1
        gate.free.release(len(slow) + 1)
        until(lambda: all(known.ensure(a) for a in slow), "the others have their turns")


def test_eight_registries_that_drip_do_not_hold_a_ninth():
    """Real registries: eight that never finish their answer, on one host."""

    def fetch(address: str) -> Instance:
        with BootstrapClient(address, timeout_s=NEVER_S) as client:
            return client.instance(wait_s=LOOKUP_WAIT_S)

    with lookups(fetch) as known:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
        try:
            for listener in listeners:
                known.ensure(f"127.0.0.1:{listener.getsockname()[1]}")
            refused = "[::1]:1"
            known.ensure(refused)
            until(lambda: known.problem(refused), "the ninth was asked")
            assert all(known.looks_up(f"127.0.0.1:{s.getsockname()[1]}") for s in listeners)
        finally:
            for listener in listeners:
                listener.close()


def test_what_waited_too_long_is_not_looked_up_any_more():
    gate, now_s = Gate(), [0.0]
    with lookups(gate, clock=lambda: now_s[0]) as known:
        first = [f"{HOST_A}:{port}" for port in range(1, instances.WORKERS_OF_ONE_HOST + 1)]
        for address in [*first, f"{HOST_A}:77"]:
            known.ensure(address)
        until(lambda: len(gate.began) == len(first), "the others are asked")
        now_s[0] = instances.WAITING_MAX_S
        gate.free.release(len(first))
        until(lambda: known.problem(f"{HOST_A}:77"), "it was given up")
        assert "waited 15 s" in str(known.problem(f"{HOST_A}:77"))
        assert sorted(gate.began) == first


def test_what_is_kept_is_bounded(monkeypatch):
    for bound in ("KNOWN_MAX", "PROBLEMS_MAX", "WAITING_MAX"):
        monkeypatch.setattr(instances, bound, 3)
    gate = Gate()
    with lookups(gate) as known:
        some = [f"10.0.1.{number}:1" for number in range(9)]
        for address in some:
            known.ensure(address)
            gate.free.release()
            until(lambda a=address: known.ensure(a), "it is known")
        assert list(known.infos) == some[-3:]
        assert known.get(some[0]) is None
        for address in (f"{HOST_A}:{port}" for port in range(1, 30)):
            known.ensure(address)
        assert "3 look-ups of prefill instances are queued" in str(known.problem(f"{HOST_A}:29"))
        gate.free.release(30)


def test_an_exception_that_nobody_foresaw_is_a_problem_and_not_the_end_of_look_ups():
    def broken(address: str) -> Instance:
        raise RecursionError("unforeseen")

    with lookups(broken) as known:
        for _ in range(2):
            known.ensure(f"{HOST_A}:1")
            until(lambda: known.problem(f"{HOST_A}:1"), "the problem is known")
        assert "unforeseen" in str(known.problem(f"{HOST_A}:1"))


def test_a_look_up_that_failed_is_made_again_when_asked():
    answers: list[Instance | None] = [None, instance()]

    def fetch(address: str) -> Instance:
        answer = answers.pop(0)
        if answer is None:
            raise BootstrapError("not yet")
        return answer

    with lookups(fetch) as known:
        until(lambda: known.ensure(f"{HOST_A}:1"), "it is known")
        assert known.problem(f"{HOST_A}:1") is None
        known.forget(f"{HOST_A}:1")
        assert known.get(f"{HOST_A}:1") is None


def test_an_instance_that_was_restarted_is_known_before_it_is_asked_for():
    """Not while its registry still tells of the life that was lost."""
    address, now_s, asked = f"{HOST_A}:1", [0.0], threading.Semaphore(0)
    answers: list[Instance | None] = [instance(1)]

    def fetch(_: str) -> Instance:
        answer = answers[0]
        asked.release()
        if answer is None:
            raise BootstrapError("cannot be reached")
        return answer

    def is_asked_again(known) -> bool:
        now_s[0] += instances.RETURN_MAX_S
        known.tick()
        return asked.acquire(timeout=1)

    with lookups(fetch, clock=lambda: now_s[0]) as known:
        until(lambda: known.ensure(address), "it is known")
        assert asked.acquire(timeout=WAIT_S)
        known.forget(address)
        for still_the_former_or_nobody in (instance(1), None):
            answers[0] = still_the_former_or_nobody
            for _ in range(2):  # so that the first one's answer has been taken in
                until(lambda: is_asked_again(known), "the registry is asked")
            assert known.get(address) is None
        answers[0] = instance(2)

        def is_known_again() -> bool:  # maybe some time after the registry was asked
            is_asked_again(known)
            return address in known.infos

        until(is_known_again, "it is known again")
        assert known.get(address) == instance(2)
        while asked.acquire(timeout=0):
            pass  # it was asked later than the test waits for that
        now_s[0] += instances.RETURN_MAX_S
        known.tick()  # nobody is looked for any more
        assert not asked.acquire(timeout=0)


TICKS_AS_THE_INTERPRETER_ENDS = """
import concurrent.futures.thread, threading, time
from bootstrap_server import Instance, InstanceConfig, KVFormat, Rank, RankCoords, Topology
from sglang_mooncake.fetching import LOOKUP_WAIT_S, fetch_instance
from sglang_mooncake.instances import PrefillInstances
from sglang_mooncake.registries import Registries

config = InstanceConfig(topology=Topology(1, 1, 1, 1), format=KVFormat(1, "bfloat16", None))
found = Instance(config, 1, (Rank(RankCoords(0, 0, 0, 0), "127.0.0.1", 1),))
known = PrefillInstances(Registries(), lambda _: found, lambda: 0.0)
while not known.ensure("192.0.2.1:1"):
    time.sleep(0.01)
known.forget("192.0.2.1:1")

def tick():
    while not concurrent.futures.thread._shutdown:
        time.sleep(0.01)
    time.sleep(0.2)
    known.tick()
    known.tick()
    print("ticked", known.returning)

threading.Thread(target=tick).start()
"""


@pytest.mark.slow
def test_nobody_is_looked_for_as_the_interpreter_ends():
    """The control loop lives a little longer than the executors that it hands work to."""
    command = [sys.executable, "-c", TICKS_AS_THE_INTERPRETER_ENDS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "ticked 1\n", "")


@contextmanager
def lost_and_looked_up_at_once() -> Iterator[tuple[PrefillInstances, list[float], list[Instance]]]:
    """Its registry still tells of the life that was lost. The time; what the registry says."""
    address, now_s, answers = f"{HOST_A}:1", [0.0], [instance(1)]
    with lookups(lambda _: answers[0], clock=lambda: now_s[0]) as known:
        for _ in range(2):
            until(lambda: known.ensure(address), "it is known")
            known.forget(address)
        until(lambda: known.ensure(address), "the registry names it still")
        assert known.returning == 1
        yield known, now_s, answers


def test_a_restart_is_noticed_though_a_request_has_brought_the_former_life_back():
    with lost_and_looked_up_at_once() as (known, now_s, answers):
        answers[0] = instance(2)
        now_s[0] = instances.RETURN_FIRST_S
        known.tick()
        until(lambda: known.get(f"{HOST_A}:1") == instance(2), "the new life is known")
        assert known.returning == 0


def test_an_instance_that_its_registry_names_when_leases_have_ended_was_not_dead():
    with lost_and_looked_up_at_once() as (known, now_s, _):
        now_s[0] = instances.RETURN_NOT_DEAD_S - 0.1
        known.tick()
        until(lambda: not known._returns[f"{HOST_A}:1"].at_work, "the registry has answered")
        assert known.returning == 1
        now_s[0] += instances.RETURN_MAX_S
        known.tick()
        until(lambda: known.returning == 0, "nobody asks any more")
        assert known.get(f"{HOST_A}:1") == instance(1)


def test_an_instance_that_does_not_come_back_is_given_up():
    address, now_s = f"{HOST_A}:1", [0.0]
    with lookups(lambda _: instance(), clock=lambda: now_s[0]) as known:
        until(lambda: known.ensure(address), "it is known")
        known.forget(address)
        assert known.returning == 1
        now_s[0] = instances.RETURN_GIVEN_UP_S
        known.tick()
        assert known.returning == 0


@pytest.mark.parametrize("keys", [Keys(), Keys.from_secrets([b"a" * 43])], ids=["open", "secret"])
def test_a_registry_beside_its_own_answers_for_an_instance(keys):
    with (
        closing(socket.socket()) as nobody,
        BootstrapServer("127.0.0.1", 0, keys=keys.registry) as beside,
    ):
        nobody.bind(("127.0.0.1", 0))
        own, other = f"127.0.0.1:{nobody.getsockname()[1]}", f"127.0.0.1:{beside.port}"
        name = instance_name_of(own)
        found = instance()
        record = signed(RankRecord(found.config, found.ranks[0]), keys.record, name)
        with pytest.raises(Unreachable, match=own):
            fetch_instance(own, keys, [other])
        with RankLease(other, record, instance=name, deadline_s=None, keys=keys.registry):
            until(lambda: is_known(own, keys, other), "the registry beside answers")


def is_known(own: str, keys: Keys, other: str) -> bool:
    try:
        return bool(fetch_instance(own, keys, [other]))
    except Unreachable:
        return False
