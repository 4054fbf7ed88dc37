# SPDX-License-Identifier: Apache-2.0
"""What engines count: by transport, rail and link, both directions, beyond the ends of links."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path

from te_contract import EMPTY, TIMEOUT_S, Pair, Way, outcome, paired
from te_far import wait_until

import te
from te.fences import Fence, FenceCounter
from te.reasons import Reason, reason_name
from te.stats import FenceStats, RailFlow, flows_of, outcomes_of, transport_stats
from te.status import ask, process_name

DONE, FAILED, CANCELLED = te.Status.DONE, te.Status.FAILED, te.Status.CANCELLED
MIB = 1 << 20


def of_transport(engine: te.Engine, way: Way) -> te.TransportStats:
    found = engine.stats().by_transport
    assert set(found) == {way.transport}
    return found[way.transport]


def test_transfers_are_counted_with_their_blocks_and_bytes(pair: Pair) -> None:
    """Blocks as the caller gave them, also where te makes one of several."""
    pair.target.expect(1)
    at = [0, 100, 200, 4096]
    assert pair.write(at, at, 100, tag=1).wait(TIMEOUT_S) is DONE
    assert pair.peer.write(EMPTY, tag=1).wait(TIMEOUT_S) is DONE
    assert pair.peer.read(pair.blocks_back([0, 100], [0, 100], 100)).wait(TIMEOUT_S) is DONE
    assert outcome(pair.write(0, 0, 100, tag=2)) is FAILED
    source = of_transport(pair.source, pair.way).outcomes
    target = of_transport(pair.target, pair.way).outcomes
    assert (source.transfers_done, source.blocks_done, source.bytes_done) == (3, 6, 600)
    assert source.transfers_failed == {"was_refused": 1}
    assert (source.transfers_landed, source.bytes_landed) == (0, 0)
    assert (target.transfers_landed, target.bytes_landed) == (2, 400)
    assert (target.transfers_done, target.transfers_failed) == (0, {})


def test_a_transfer_that_was_cancelled_is_counted(pair: Pair) -> None:
    found: list[te.Status] = []

    def one_is_cancelled() -> bool:
        transfers = [pair.write(0, 0, 4 * MIB) for _ in range(8)]
        for one in reversed(transfers):
            one.cancel()
        found.extend(outcome(one) for one in transfers)
        return CANCELLED in found

    wait_until(one_is_cancelled, "a transfer is cancelled")
    counted = of_transport(pair.source, pair.way).outcomes
    assert counted.transfers_done == found.count(DONE)
    assert counted.transfers_cancelled == found.count(CANCELLED)
    assert counted.bytes_done == counted.transfers_done * 4 * MIB


def test_rails_and_links_add_up_to_the_transport(way: Way) -> None:
    with paired(way, segment_bytes=1 << 18, rails=3) as pair:
        pair.target.expect(1)

        def all_are_up() -> bool:
            """Where rails are made behind one another, one may be late."""
            (link,) = pair.source.links()
            return all(one.state == "up" for one in link.rails)

        wait_until(all_are_up, "all rails are up")
        for _ in range(4):
            assert pair.write(0, 0, 4 * MIB, tag=1).wait(TIMEOUT_S) is DONE
        for engine, is_incoming, other in (
            (pair.source, False, pair.target),
            (pair.target, True, pair.source),
        ):
            whole = of_transport(engine, way)
            (link,) = engine.links()
            assert (link.peer, link.is_incoming, link.transport) == (
                other.id,
                is_incoming,
                way.transport,
            )
            assert tuple(one.flow for one in link.rails)[: len(whole.rails)] == whole.rails
            sent, received = (0, 16 * MIB) if is_incoming else (16 * MIB, 0)
            assert (whole.bytes_sent, whole.bytes_received) == (sent, received)
            assert sum(one.bytes_sent for one in whole.rails) == sent
            assert sum(one.bytes_received for one in whole.rails) == received
            assert link.nbytes == 16 * MIB
            assert link.outcomes == whole.outcomes
            assert all(one.state == "up" for one in link.rails)
            assert link.transfers_unfinished == 0
        assert len(link.rails) > 1

        def several_carry() -> bool:
            """Who is free takes the next segment, which may be the same one for a while."""
            assert pair.write(0, 0, 4 * MIB, tag=1).wait(TIMEOUT_S) is DONE
            (link,) = pair.target.links()
            return sum(bool(one.flow.bytes_received) for one in link.rails) > 1

        wait_until(several_carry, "several rails carry something")


def test_links_that_are_gone_stay_in_the_sums(pair: Pair) -> None:
    pair.target.expect(1)
    assert pair.write(0, 0, MIB, tag=1).wait(TIMEOUT_S) is DONE
    before = of_transport(pair.source, pair.way)
    pair.peer.close()
    assert outcome(pair.write(0, 0, 100, tag=1)) is FAILED
    wait_until(lambda: pair.target.links() == (), "the target knows the link no more")
    assert pair.source.links() == ()
    pair.peer = pair.source.connect(pair.target.card())
    assert pair.write(0, 0, MIB, tag=1).wait(TIMEOUT_S) is DONE
    after, target = (of_transport(one, pair.way) for one in (pair.source, pair.target))
    assert after.bytes_sent == 2 * before.bytes_sent == 2 * MIB
    assert target.bytes_received == 2 * MIB
    assert target.outcomes.transfers_landed == after.outcomes.transfers_done == 2
    assert after.outcomes.transfers_failed == {"peer_closed": 1}
    assert after.links_ended == {"peer_closed": 1}
    assert sum(target.links_ended.values()) == 1
    assert (pair.source.stats().connects, pair.source.stats().connects_fallen_back) == (2, 0)


def test_a_fence_is_counted_once_with_its_time(pair: Pair) -> None:
    assert pair.target.stats().fences == FenceStats(0, 0.0, 0)
    for tag in (1, 2):
        pair.target.expect(tag)
        fence = pair.target.revoke(tag)
        assert fence is not None
        fence.wait(TIMEOUT_S)
        assert fence.poll()
        assert pair.target.fence(tag) == 0
    counted = pair.target.stats().fences
    assert (counted.confirmed, counted.timed_out) == (2, 0)
    assert 0 < counted.confirmed_s < 2 * TIMEOUT_S


def test_a_fence_that_was_waited_for_in_vain_is_counted() -> None:
    counter = FenceCounter()
    counter.timed_out()
    counter.confirmed(0.5)
    counter.confirmed(0.25)
    assert counter.stats() == FenceStats(2, 0.75, 1)


class TwoAtOnce:
    """Of a tag that two threads find closed at the same time."""

    def __init__(self) -> None:
        self._both = threading.Barrier(2)

    def wait(self, timeout_s: float) -> bool:
        self._both.wait(timeout_s)
        return True

    def forget(self) -> int:
        self._both.wait(TIMEOUT_S)
        return 5


def test_a_fence_that_two_threads_confirm_is_counted_once() -> None:
    counter = FenceCounter()
    fence = Fence(1, TwoAtOnce(), counter)  # type: ignore[arg-type]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert list(pool.map(fence.wait, [TIMEOUT_S] * 2)) == [5, 5]
    assert counter.stats().confirmed == 1


def test_registered_memory_is_counted_by_kind() -> None:
    with te.Engine(te.Config(transports=("tcp",))) as engine:
        buffer = te.allocate(8192)
        regions = [engine.register(buffer, 4096), engine.register(bytearray(100))]
        assert engine.stats().registered_bytes == {"host": 4196}
        for one in regions:
            engine.deregister(one)
        assert engine.stats().registered_bytes == {}


def test_a_transport_that_was_not_the_first_choice_is_counted() -> None:
    with (
        te.Engine(te.Config(transports=("samehost", "tcp"), connect_timeout_s=TIMEOUT_S)) as source,
        te.Engine(te.Config(transports=("tcp",), connect_timeout_s=TIMEOUT_S)) as target,
    ):
        source.connect(target.card())
        counted = source.stats()
        assert (counted.connects, counted.connects_fallen_back) == (1, 1)
        (link,) = source.links()
        assert "samehost: the other engine does not offer it" in link.transport_reason


def test_a_link_tells_where_it_goes_and_who_encrypts(by_records: None) -> None:
    keys = (bytes(range(32)),)
    for encrypt, by in ((False, ""), (True, "libcrypto")):
        config = te.Config(
            transports=("tcp",), rails=2, keys=keys, encrypt=encrypt, connect_timeout_s=TIMEOUT_S
        )
        with te.Engine(config) as source, te.Engine(config) as target:
            peer = source.connect(target.card())
            (link,) = source.links()
            host, port = peer.address
            assert link.address == f"{host}:{port}"
            assert [one.name.partition(" → ")[2] for one in link.rails] == [link.address] * 2
            assert len({one.name for one in link.rails}) == 2
            wait_until(lambda target=target: len(target.links()) == 1, "the link is taken in")
            (incoming,) = target.links()
            assert link.encrypted_by == incoming.encrypted_by == by
            assert incoming.address in {one.name.partition(" → ")[0] for one in link.rails}
            assert peer.is_encrypted is encrypt


def test_the_answer_of_the_status_socket_has_all_of_it(pair: Pair) -> None:
    pair.target.expect(1)
    assert pair.write(0, 0, MIB, tag=1).wait(TIMEOUT_S) is DONE
    assert pair.source.status_path is not None
    answer = ask(pair.source.status_path, "engine", timeout_s=TIMEOUT_S)
    assert (answer["process"], answer["label"]) == (process_name(), "")
    assert answer["stats"]["by_transport"][pair.way.transport]["bytes_sent"] == MIB
    (link,) = answer["links"]
    assert sum(one["flow"]["bytes_sent"] for one in link["rails"]) == MIB
    assert link["outcomes"]["transfers_done"] == 1


def test_an_engine_answers_with_the_label_of_its_application(tmp_path: Path) -> None:
    config = te.Config(transports=("tcp",), status_dir=tmp_path / "s", label="prefill of m")
    with te.Engine(config) as engine:
        assert engine.status_path is not None
        assert ask(engine.status_path, "engine", timeout_s=TIMEOUT_S)["label"] == "prefill of m"


# -- pure


def test_reasons_have_names() -> None:
    assert [reason_name(one) for one in (Reason.STALLED, Reason.NO_RAIL, 29)] == [
        "stalled",
        "no_rail",
        "code_29",
    ]


def test_rails_that_carried_nothing_are_left_out_at_the_end() -> None:
    assert flows_of([(0, 0), (3, 0), (0, 0)]) == (RailFlow(0, 0), RailFlow(3, 0))
    assert flows_of([(0, 0)] * 3) == ()
    assert flows_of([(0, 0)] * 3, least=2) == (RailFlow(0, 0), RailFlow(0, 0))


def test_a_tally_becomes_stats() -> None:
    outcomes = (5, 1, {1: 2}, 50, 500, 7, 700)
    found = transport_stats(([(1, 2), (0, 4), (0, 0)], outcomes, {6: 3}), 8, 9)
    assert found.outcomes == outcomes_of(outcomes)
    assert found.outcomes.transfers_failed == {"stalled": 2}
    assert (found.bytes_sent, found.bytes_received) == (1, 6)
    assert found.rails == (RailFlow(1, 2), RailFlow(0, 4))
    assert (found.links_ended, found.rails_lost, found.rails_remade) == ({"engine_closed": 3}, 8, 9)
