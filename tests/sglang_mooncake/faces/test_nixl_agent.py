# SPDX-License-Identifier: Apache-2.0
"""Agents over te: what is copied and announced, and how calls end."""

from __future__ import annotations

import gc
import threading
import uuid
import weakref

import numpy as np
import pytest
from nixl_agents import agent, blocks, ended, messages, options, raises_until, registered
from te_far import wait_until

import te
from sglang_mooncake.faces.nixl import Options, links, requests
from sglang_mooncake.faces.nixl.api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
from sglang_mooncake.faces.nixl.impl import CONNECTING_THREADS, ENDING_THREADS
from sglang_mooncake.faces.nixl.life import Life
from sglang_mooncake.faces.nixl.names import (
    Backend,
    InvalidParam,
    Mismatch,
    NotAllowed,
    NoTelemetry,
    NotFound,
    NotPosted,
    NotSupported,
    RepostActive,
)

KIB = 1024


@pytest.fixture
def pair():
    """Two agents; the first knows the second, which knows nobody."""
    return agent("a"), agent("b")


def handle_of(a: nixl_agent, operation: str, here: np.ndarray, there: np.ndarray, **more):
    return a.initialize_xfer(
        operation,
        a.get_xfer_descs(blocks(here, KIB), "DRAM"),
        a.get_xfer_descs(blocks(there, KIB), "VRAM"),
        more.pop("name", "b"),
        **more,
    )


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_prepared_lists_move_what_indices_select_and_tell_the_other_side(pair, operation) -> None:
    a, b = pair
    here, there = registered(a, 16 * KIB, seed=1), registered(b, 16 * KIB, seed=2)
    before = {"READ": there, "WRITE": here}[operation].copy()
    assert a.add_remote_agent(b.get_agent_metadata()) == b"b"
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", blocks(here, KIB), "DRAM")
    runs = np.array([(there.ctypes.data, KIB, 0, KIB, 16)], np.uint64)
    remote = a.prep_xfer_dlist(b"b", runs, "DRAM")
    handle = a.make_prepped_xfer(operation, local, [3, 4, 9], remote, np.array([0, 1, 15]), b"id:1")
    assert handle
    a.transfer(handle)
    assert ended(a, handle) == "DONE"
    mine, other = here.reshape(16, KIB)[[3, 4, 9]], there.reshape(16, KIB)[[0, 1, 15]]
    np.testing.assert_array_equal(mine, other)
    source = before.reshape(16, KIB)
    np.testing.assert_array_equal(mine, source[[0, 1, 15] if operation == "READ" else [3, 4, 9]])
    # Its sender is known by its name alone.
    assert messages(b, 1) == {"a": [b"id:1"]}
    assert a.query_xfer_backend(handle) == "UCX"
    a.release_xfer_handle(handle)
    a.release_xfer_handle(handle)
    a.release_dlist_handle(local)
    assert b.get_new_notifs() == {}


def test_a_handle_is_posted_again_and_tells_again(pair) -> None:
    a, b = pair
    here, there = registered(a, KIB), registered(b, KIB, seed=1)
    a.add_remote_agent(b.get_agent_metadata())
    handle = handle_of(a, "READ", here, there, notif_msg="first")
    with pytest.raises(NotPosted):
        a.check_xfer_state(handle)
    for count, message in [(1, b""), (2, b"other"), (3, b"")]:
        here[:] = 0
        a.transfer(handle, message)
        assert ended(a, handle) == "DONE"
        np.testing.assert_array_equal(here, there)
        del count
    assert messages(b, 3) == {"a": [b"first", b"other", b"other"]}


def test_an_agent_copies_within_itself() -> None:
    a = agent("a")
    src, dst = registered(a, 8 * KIB, seed=3), registered(a, 8 * KIB)
    handle = handle_of(a, "WRITE", src, dst, name="a", notif_msg=b"to me")
    a.transfer(handle)
    assert ended(a, handle) == "DONE"
    np.testing.assert_array_equal(src, dst)
    assert messages(a, 1) == {"a": [b"to me"]}


def test_messages_without_a_transfer_are_taken_one_by_one(pair) -> None:
    a, b = pair
    with pytest.raises(NotFound):
        a.send_notif("b", b"x")
    a.add_remote_agent(b.get_agent_metadata())
    for one in (b"HB:1", "HB:2", b"done 7"):
        a.send_notif(b"b", one)
    wait_until(lambda: len(b.update_notifs().get("a", [])) == 3, "three came")
    assert b.check_remote_xfer_done("a", b"done")
    assert not b.check_remote_xfer_done(b"a", b"done")
    assert b.check_remote_xfer_done("a", b":2", tag_is_prefix=False)
    assert b.check_remote_xfer_done("a", b"")
    assert b.notifs == {"a": []}


def test_agents_are_told_of_by_metadata_and_nothing_else(pair) -> None:
    a, b = pair
    early = registered(b, KIB)
    first = b.get_agent_metadata()
    late = registered(b, KIB, seed=5)
    second = b.get_agent_metadata()
    assert not a.check_remote_metadata("b")
    with pytest.raises(NotFound, match="no agent 'b'"):
        a.prep_xfer_dlist("b", blocks(early, KIB), "DRAM")
    a.add_remote_agent(first)
    assert a.check_remote_metadata("b")
    wanted = a.get_xfer_descs(blocks(late, KIB), "DRAM")
    assert not a.check_remote_metadata("b", wanted)
    with pytest.raises(NotFound, match="descriptor 0: agent 'b' has not registered"):
        a.prep_xfer_dlist("b", wanted)
    for data in (second, first):  # What is older changes nothing.
        a.add_remote_agent(data)
        assert a.check_remote_metadata("b", wanted)
    prepared = a.prep_xfer_dlist("b", wanted)
    a.remove_remote_agent("b")
    a.remove_remote_agent("b")
    here = registered(a, KIB)
    local = a.prep_xfer_dlist("", blocks(here, KIB), "DRAM")
    with pytest.raises(NotFound, match="was removed"):
        a.make_prepped_xfer("READ", local, [0], prepared, [0])


def test_a_part_of_metadata_adds_to_what_is_known(pair) -> None:
    a, b = pair
    memory = registered(b, KIB)
    descs = b.get_reg_descs([(memory.ctypes.data, KIB, 0, "")], "DRAM")
    part = b.get_partial_agent_metadata(descs)
    with pytest.raises(NotFound):
        a.add_remote_agent(part)
    a.add_remote_agent(
        b.get_partial_agent_metadata(b.get_reg_descs(np.empty((0, 3), np.uint64), "DRAM"))
    )
    wanted = a.get_xfer_descs(blocks(memory, KIB), "DRAM")
    assert a.check_remote_metadata("b")
    assert not a.check_remote_metadata("b", wanted)
    a.add_remote_agent(part)
    assert a.check_remote_metadata("b", wanted)
    with pytest.raises(NotFound):
        b.get_partial_agent_metadata(b.get_reg_descs([(5, 5, 0, "")], "DRAM"))


def test_a_name_belongs_to_one_agent_at_a_time(pair) -> None:
    a, b = pair
    a.add_remote_agent(b.get_agent_metadata())
    other = agent("b")
    with pytest.raises(NotAllowed, match="remove it first"):
        a.add_remote_agent(other.get_agent_metadata())
    a.remove_remote_agent("b")
    assert a.add_remote_agent(other.get_agent_metadata()) == b"b"
    with pytest.raises(InvalidParam, match="itself"):
        a.add_remote_agent(a.get_agent_metadata())
    with pytest.raises(Mismatch):
        a.add_remote_agent(b"nonsense")


def test_memory_is_registered_again_and_overlapping(pair) -> None:
    a, b = pair
    there = registered(b, 4 * KIB, seed=1)
    a.add_remote_agent(b.get_agent_metadata())
    here = np.zeros(4 * KIB, np.uint8)
    whole = a.register_memory([(here.ctypes.data, 4 * KIB, 0, "")], "DRAM")
    again = a.register_memory([(here.ctypes.data, 4 * KIB, 0, "x")], "DRAM")
    view = a.register_memory([(here.ctypes.data + KIB, KIB, 0, "")], "DRAM")
    for gone in (whole, view):
        a.deregister_memory(gone)
    handle = handle_of(a, "READ", here, there)
    a.transfer(handle)
    assert ended(a, handle) == "DONE"
    np.testing.assert_array_equal(here, there)
    a.release_xfer_handle(handle)
    a.deregister_memory(again)
    with pytest.raises(NotFound):
        a.deregister_memory(again)
    with pytest.raises(NotFound, match="descriptor 0: this agent has not"):
        handle_of(a, "READ", here, there)


def test_a_list_in_use_is_deregistered_by_the_same_call_later(pair, monkeypatch) -> None:
    a, _ = pair
    memory = np.zeros(3 * KIB, np.uint8)
    descs = a.get_reg_descs([(*row, "") for row in blocks(memory, KIB)], "DRAM")
    a.register_memory(descs)
    engine = a.agent._impl.engine
    deregister = engine.deregister

    def in_use(region: te.Region, timeout_s: float) -> None:
        if region.address == memory.ctypes.data + KIB:
            raise te.RegistrationError("transfers still read from it")
        deregister(region, timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "deregister", in_use)
        with pytest.raises(Backend, match="must not be freed yet"):
            a.deregister_memory(descs)
    a.deregister_memory(descs)
    with pytest.raises(NotFound):
        a.deregister_memory(descs)
    engine.deregister(engine.register(memory))  # te has forgotten all of it.


def test_registering_is_all_or_nothing(pair) -> None:
    a, _ = pair
    good = np.zeros(KIB, np.uint8)
    rows = [(good.ctypes.data, KIB, 0, ""), (16, KIB, 0, "")]
    with pytest.raises(Backend):
        a.register_memory(rows, "DRAM")
    with pytest.raises(NotFound):
        a.deregister_memory(a.get_reg_descs(rows[:1], "DRAM"))
    with pytest.raises(InvalidParam):
        a.register_memory([(good.ctypes.data, 0, 0, "")], "DRAM")
    with pytest.raises(Backend, match="nothing of FILE_SEG"):
        a.register_memory([(0, KIB, 0, "path")], "FILE")


def test_what_the_peer_no_longer_has_is_a_settled_failure(pair, caplog) -> None:
    a, b = pair
    here, there = registered(a, KIB), np.zeros(KIB, np.uint8)
    descs = b.register_memory([(there.ctypes.data, KIB, 0, "")], "DRAM")
    a.add_remote_agent(b.get_agent_metadata())
    b.deregister_memory(descs)
    for operation in ("READ", "WRITE"):
        handle = handle_of(a, operation, here, there)
        a.transfer(handle)
        assert ended(a, handle) == "ERR"
        assert ended(a, handle) == "ERR"
        a.release_xfer_handle(handle)
    assert "refused" in caplog.text
    assert a.check_remote_metadata("b")


def test_a_read_that_failed_ends_when_no_thread_can_be_started(pair, monkeypatch) -> None:
    a, b = pair
    here, there = registered(a, KIB), np.zeros(KIB, np.uint8)
    descs = b.register_memory([(there.ctypes.data, KIB, 0, "")], "DRAM")
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif("b", b"connected")
    messages(b, 1)
    b.deregister_memory(descs)

    def no_thread(*arguments: object) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(a.agent._impl.ending, "submit", no_thread)
    handle = handle_of(a, "READ", here, there)
    a.transfer(handle)
    assert ended(a, handle) == "ERR"


def test_transfers_that_do_not_end_keep_no_other_agent_waiting(pair, monkeypatch) -> None:
    """Neither one that is being connected nor one whose transfers fail."""
    a, b = pair
    here, there = registered(a, KIB), np.zeros(KIB, np.uint8)
    is_over, cancel = threading.Event(), te.Transfer.cancel

    def cancels(transfer: te.Transfer) -> None:
        if transfer._describe.__self__.id == b.agent._impl.engine.id:
            assert is_over.wait(60.0)
        cancel(transfer)

    def failing(one: nixl_agent, count: int) -> list:
        descs = one.register_memory([(there.ctypes.data, KIB, 0, "")], "DRAM")
        a.add_remote_agent(one.get_agent_metadata())
        one.deregister_memory(descs)
        handles = [handle_of(a, "READ", here, there, name=one.name) for _ in range(count)]
        for handle in handles:
            a.transfer(handle)
        return handles

    monkeypatch.setattr(te.Transfer, "cancel", cancels)
    slow = failing(b, CONNECTING_THREADS + ENDING_THREADS)
    for handle in slow:
        request = a.agent._requests[handle.number]
        wait_until(lambda of=request: of._ending is not None, "it has failed")
    try:
        (other,) = failing(agent("c"), 1)
        assert ended(a, other) == "ERR"
        assert {a.check_xfer_state(one) for one in slow} == {"PROC"}
    finally:
        is_over.set()
    assert {ended(a, one) for one in slow} == {"ERR"}


def test_more_transfers_than_te_takes_wait_here() -> None:
    a, b = agent("a", max_queued_transfers=1), agent("b")
    here, there = registered(a, 64 * KIB), registered(b, 64 * KIB, seed=2)
    a.add_remote_agent(b.get_agent_metadata())
    handles = [
        a.initialize_xfer(
            "READ",
            a.get_xfer_descs([one], "DRAM"),
            a.get_xfer_descs([other], "DRAM"),
            "b",
            f"{i}",
        )
        for i, (one, other) in enumerate(zip(blocks(here, KIB), blocks(there, KIB), strict=True))
    ]
    for handle in handles:
        a.transfer(handle)
    # Nobody asks after them.
    assert len(messages(b, 64)["a"]) == 64
    assert {a.check_xfer_state(handle) for handle in handles} == {"DONE"}
    np.testing.assert_array_equal(here, there)


def test_room_that_transfers_of_before_make_is_used(pair, monkeypatch) -> None:
    """Of an agent that was removed and added again: te counts them together."""
    a, b = pair
    here, there = registered(a, KIB, seed=1), registered(b, KIB)
    a.add_remote_agent(b.get_agent_metadata())
    of_before = a.agent._impl.remotes.get("b").link  # As those under way have it.
    a.remove_remote_agent("b")
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif("b", b"connected")
    messages(b, 1)
    handle = handle_of(a, "WRITE", here, there)

    def full(*arguments: object) -> None:
        raise te.QueueFull("full")

    with monkeypatch.context() as patch:
        patch.setattr(te.Peer, "write", full)
        assert a.transfer(handle) == "PROC"
    of_before.drain()  # As the end of one of them does.
    assert ended(a, handle) == "DONE"


class Slow:
    """A transfer that ends when it has been waited for a second time."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def poll(self) -> te.Status:
        return te.Status.PENDING if len(self.waits) < 2 else te.Status.DONE

    def wait(self, timeout_s: float) -> te.Status:
        self.waits.append(timeout_s)
        if self.poll() is te.Status.PENDING:
            raise te.WaitTimeout("no outcome yet")
        return self.poll()

    def add_done_callback(self, callback: object) -> None:
        """Nobody is told."""


def test_who_does_nothing_but_ask_waits_for_the_end(pair, monkeypatch) -> None:
    a, b = pair
    here, there = registered(a, KIB), registered(b, KIB)
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif("b", b"connected")
    messages(b, 1)
    made: list[Slow] = []

    def read(peer: te.Peer, blocks: te.Blocks) -> Slow:
        made.append(Slow())
        return made[-1]

    monkeypatch.setattr(te.Peer, "read", read)
    handle = handle_of(a, "READ", here, there)
    monkeypatch.setattr(requests, "AGAIN_S", 0.0)
    assert a.transfer(handle) == "PROC"
    assert {a.check_xfer_state(handle) for _ in range(3)} == {"PROC"}
    assert made[0].waits == []
    monkeypatch.setattr(requests, "AGAIN_S", 1e9)
    assert a.check_xfer_state(handle) == "PROC"
    assert made[0].waits == [requests.LOOK_S]
    assert a.check_xfer_state(handle) == "DONE"
    assert a.transfer(handle) == "PROC"
    assert a.check_xfer_state(handle) == "PROC"
    assert made[1].waits == [], "of this post it is the first question"
    assert a.check_xfer_state(handle) == "PROC"
    assert a.check_xfer_state(handle) == "DONE"


def test_telemetry_is_for_those_who_ask_for_it(pair) -> None:
    a, b = agent("a", nixl_agent_config(capture_telemetry=True)), pair[1]
    here, there = registered(a, 4 * KIB), registered(b, 4 * KIB)
    a.add_remote_agent(b.get_agent_metadata())
    handle = handle_of(a, "WRITE", here, there)
    a.transfer(handle)
    assert ended(a, handle) == "DONE"
    told = a.get_xfer_telemetry(handle)
    assert (told.totalBytes, told.descCount) == (4 * KIB, 4)
    assert told.xferDuration >= told.postDuration > 0
    assert a.estimate_xfer_cost(handle) == (0, 0, "UNKNOWN")
    c = agent("c")
    mine, other = registered(c, KIB), registered(c, KIB)
    handle = handle_of(c, "WRITE", mine, other, name="c")
    with pytest.raises(NoTelemetry):
        c.get_xfer_telemetry(handle)


@pytest.mark.parametrize("said", [True, False])
def test_the_operators_word_on_telemetry_goes_before_the_callers(said: bool) -> None:
    given = options()
    given = Options(given.open_engine, given.make_notices, telemetry=lambda: said)
    one = agent("a", nixl_agent_config(capture_telemetry=not said), given)
    memory = registered(one, 2 * KIB)
    handle = handle_of(one, "WRITE", memory[:KIB], memory[KIB:], name="a")
    if said:
        assert one.get_xfer_telemetry(handle).totalBytes == KIB
    else:
        with pytest.raises(NoTelemetry):
            one.get_xfer_telemetry(handle)


def test_one_backend_is_there_and_is_asked_for_as_ucx() -> None:
    one = agent("a", nixl_agent_config(backends=[], num_threads=3))
    assert one.get_plugin_list() == ["UCX"]
    with pytest.raises(InvalidParam, match="create UCX first"):
        one.get_agent_metadata()
    with pytest.raises(NotFound, match="LIBFABRIC"):
        one.create_backend("LIBFABRIC")
    with pytest.raises(InvalidParam, match="no number"):
        one.create_backend("UCX", {"num_threads": "many"})
    one.create_backend("UCX", {"num_threads": "64", "device_list": ""})
    with pytest.raises(InvalidParam, match="already"):
        one.create_backend("UCX", {})
    assert one.get_backend_mem_types("UCX") == ["DRAM_SEG", "VRAM_SEG"]
    assert set(one.get_backend_params("UCX")) == {"num_threads", "device_list"}
    assert one.get_plugin_params("UVX") == {}
    assert one.get_backend_mem_types("UVX") == []
    memory = registered(one, KIB)
    descs = one.get_reg_descs([(memory.ctypes.data, KIB, 0, "")], "DRAM")
    with pytest.raises(NotSupported):
        one.query_memory(descs, "UCX")
    with pytest.raises(NotSupported):
        one.send_local_metadata()


def test_arguments_that_cannot_be_meant() -> None:
    one = agent("a")
    memory = registered(one, 2 * KIB)
    side = one.prep_xfer_dlist("", blocks(memory, KIB), "DRAM")
    with pytest.raises(KeyError):
        one.make_prepped_xfer("RD", side, [0], side, [0])
    with pytest.raises(InvalidParam, match="from a list of this side"):
        one.make_prepped_xfer("READ", side, [0], side, [0])
    with pytest.raises(ValueError, match="mem type"):
        one.prep_xfer_dlist("", np.zeros((1, 5), np.uint64))
    with pytest.raises(ValueError, match="needs a name"):
        agent("")
    with pytest.raises(TypeError, match="sync_mode must be"):
        nixl_agent_config(sync_mode=1)
    nixl_agent_config(sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    assert one.get_xfer_descs(blocks(memory, KIB)) is None
    assert one.get_reg_descs(blocks(memory, KIB), "DRAM") is None
    with pytest.raises(KeyError):
        one.get_xfer_descs(blocks(memory, KIB), "V-RAM")
    again = one.deserialize_descs(
        one.get_serialized_descs(one.get_xfer_descs(blocks(memory, KIB), "cpu"))
    )
    assert list(again) == blocks(memory, KIB)


def test_a_transfer_goes_on_when_its_handle_is_dropped(pair) -> None:
    """It is released in the background, and its memory can be deregistered."""
    a, b = pair
    here, there = np.zeros(KIB, np.uint8), registered(b, KIB)
    descs = a.register_memory([(here.ctypes.data, KIB, 0, "")], "DRAM")
    a.add_remote_agent(b.get_agent_metadata())
    handle = handle_of(a, "WRITE", here, there)
    a.transfer(handle)
    del handle
    gc.collect()
    raises_until(lambda: a.deregister_memory(descs), Backend)


def test_a_handle_may_go_in_the_middle_of_anything(pair) -> None:
    """Whichever thread collects garbage may hold any lock."""
    a, b = pair
    here, there = registered(a, KIB), registered(b, KIB)
    a.add_remote_agent(b.get_agent_metadata())
    handles = [handle_of(a, "WRITE", here, there)]
    request = a.agent._requests[handles[0].number]
    a.transfer(handles[0])

    def collects() -> None:
        with a.agent._impl.ending._lock, request._lock:
            handles.clear()

    thread = threading.Thread(target=collects, daemon=True)
    thread.start()
    wait_until(lambda: not thread.is_alive(), "the thread goes on")
    wait_until(lambda: request._life is Life.RELEASED, "it is released")


def test_an_agent_that_goes_closes_its_engine() -> None:
    opened: list[te.Engine] = []
    given = options()

    def open_engine(*arguments) -> te.Engine:
        opened.append(given.open_engine(*arguments))
        return opened[0]

    one = agent(str(uuid.uuid4()), None, Options(open_engine, given.make_notices))
    reference = weakref.ref(one.agent)
    del one
    gc.collect()
    assert reference() is None
    with pytest.raises(te.ClosedError):
        opened[0].card()
    short_id = opened[0].id[:8]
    wait_until(
        lambda: not any(short_id in thread.name for thread in threading.enumerate()),
        "its threads have ended",
    )


def test_a_public_address_without_a_secret_is_refused() -> None:
    given = options()
    at_large = Options(
        given.open_engine, given.make_notices, host="8.8.8.8", how_to_insist="INSECURE=1"
    )
    with pytest.raises(Backend, match="start with INSECURE=1"):
        agent("a", None, at_large)


def test_a_post_for_which_there_is_no_room_can_be_made_again(pair, monkeypatch) -> None:
    a, b = pair
    here, there = registered(a, KIB), registered(b, KIB, seed=4)
    a.add_remote_agent(b.get_agent_metadata())
    handle = handle_of(a, "READ", here, there)
    with monkeypatch.context() as patch:
        patch.setattr(links, "WAITING_MAX", 0)
        with pytest.raises(Backend, match="wait for this peer"):
            a.transfer(handle)
    assert a.check_xfer_state(handle) == "ERR"
    a.transfer(handle)
    assert ended(a, handle) == "DONE"
    np.testing.assert_array_equal(here, there)


def test_nothing_is_posted_to_an_agent_that_was_removed(pair) -> None:
    """What raises moves nothing: the peer may have given the memory to somebody else."""
    a, b = pair
    here, there = registered(a, KIB, seed=3), registered(b, KIB)
    a.add_remote_agent(b.get_agent_metadata())
    handle, other = (handle_of(a, "WRITE", here, there) for _ in range(2))
    a.transfer(other)
    assert ended(a, other) == "DONE"
    there[:] = 0
    a.remove_remote_agent("b")
    with pytest.raises(NotFound, match="was removed"):
        a.transfer(handle)
    with pytest.raises(NotPosted):
        a.check_xfer_state(handle)
    a.add_remote_agent(b.get_agent_metadata())
    a.send_notif("b", b"behind it")
    messages(b, 1)
    assert there.tobytes() == bytes(KIB)


def test_a_post_while_it_goes_on_is_refused(pair) -> None:
    a, b = pair
    here, there = registered(a, KIB), registered(b, KIB)
    a.add_remote_agent(b.get_agent_metadata())
    handle = handle_of(a, "READ", here, there)
    link = a.agent._impl.remotes.get("b").link
    link.drain = lambda: None  # Nothing is handed to te.
    assert a.transfer(handle) == "PROC"
    with pytest.raises(RepostActive):
        a.transfer(handle)
    del link.drain
    a.release_xfer_handle(handle)
    link.drain()
    with pytest.raises(InvalidParam, match="was released"):
        a.transfer(handle)
    assert here.tobytes() == bytes(KIB)
