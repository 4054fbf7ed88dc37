# SPDX-License-Identifier: Apache-2.0
"""scripts/chaos: what is asked for, which faults come, and what a run has shown."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
from chaos_run.again import AGAIN_S
from chaos_run.control_filter import classifier, narrow, vanishing
from chaos_run.options import parse
from chaos_run.rates import ANSWERS_MIN, Window, pair_name
from chaos_run.report import as_json, svg, text
from chaos_run.resources import POOLED_THREADS, Held, grown, shared_in
from chaos_run.results import AFTERMATH_S, Happened, Result, unexplained
from chaos_run.schedule import KINDS, REGISTRY, SERVERS, Fault, Kind, faults
from chaos_run.stranger import attack
from chaos_run.traffic import End, Outcome, Way
from cpu_serving.traffic import Answer

FIRST, SECOND = "prefill-0 to decode-0", "prefill-1 to decode-1"


def nobody(*_: object) -> Answer:
    raise AssertionError("nothing is asked here")


WAYS = (
    Way(FIRST, frozenset(("prefill-0", "decode-0")), nobody),
    Way(SECOND, frozenset(("prefill-1", "decode-1")), nobody),
    Way("router", frozenset(), nobody),
)
#: From 10 to 15 s; served again at 17 s.
FROZEN = Happened(Fault("freeze", "prefill-0", 1.0, 5.0), 10.0, 15.0, 2.0)


def outcome(way: str, began_s: float, ended_s: float, end: End, error: str = "") -> Outcome:
    return Outcome(way, began_s, ended_s, end, error)


def result(*outcomes: Outcome, **changes: object) -> Result:
    answered = [outcome(way.name, 0.5, 1.0, "equal") for way in WAYS]
    fields = {"leaked_pages": {}, "held": {}, "happened": (FROZEN,)} | changes
    return Result(3, 0.0, 40.0, WAYS, outcomes=(*answered, *outcomes), **fields)  # type: ignore[arg-type]


def test_a_seed_says_which_faults_come() -> None:
    one, same = (list(islice(faults(5), 40)) for _ in range(2))
    assert one == same
    assert one != list(islice(faults(6), 40))


def test_faults_last_as_long_as_they_are_told_to_and_come_in_the_same_order() -> None:
    seeded, told = (list(islice(faults(5, lasts_s=s), 40)) for s in (None, 0.05))
    assert {one.lasts_s for one in told} == {0.0, 0.05}
    assert all(one.lasts_s == 0 for one in told if one.kind == "kill")
    assert told == [replace(one, lasts_s=0.05) if one.lasts_s else one for one in seeded]


def test_each_kind_comes_once_before_any_comes_again() -> None:
    found = [fault.kind for fault in islice(faults(0), 3 * len(KINDS))]
    for begin in range(0, len(found), len(KINDS)):
        assert set(found[begin : begin + len(KINDS)]) == set(KINDS)


def test_each_server_has_its_turn() -> None:
    kills = [fault.victim for fault in islice(faults(1, ["kill"]), 8)]
    assert Counter(kills) == dict.fromkeys(SERVERS, 2)
    assert set(kills[:4]) == set(SERVERS)


@pytest.mark.parametrize(
    ("kind", "victims"),
    [
        # The first prefill server's registry is in it, that of the second on a host of its own.
        ("registry", {"prefill-0", REGISTRY}),
        ("registry-dies", {REGISTRY}),
        ("newcomer", set(SERVERS[2:])),
        ("control-cut", set(SERVERS)),
        ("sever", set(SERVERS)),
    ],
)
def test_whom_a_kind_can_hit(kind: Kind, victims: set[str]) -> None:
    assert {fault.victim for fault in islice(faults(0, [kind]), 8)} == victims


def test_every_other_fault_of_a_server_is_alone() -> None:
    found = [fault for fault in islice(faults(2), 40) if fault.victim != REGISTRY]
    assert [fault.alone for fault in found[:6]] == [True, False, True, False, True, False]
    assert not any(fault.alone for fault in islice(faults(2), 40) if fault.victim == REGISTRY)


class Packet:
    """An Ethernet frame of IPv4."""

    def __init__(self, protocol: int, source: int, destination: int) -> None:
        ports = struct.pack(">HH", source, destination)
        self.data = bytes(23) + bytes([protocol]) + bytes(10) + ports


def says(program: str, packet: Packet, random: int) -> bool:
    """What the kernel would: the instructions of bpf(4) that are used."""
    _count, *lines = program.split(",")
    held, at = 0, 0
    while True:
        code, yes, no, value = map(int, lines[at].split())
        at += 1
        match code:
            case 0x30:
                held = packet.data[value]
            case 0x28:
                (held,) = struct.unpack_from(">H", packet.data, value)
            case 0x20:
                assert value == 0xFFFFF038
                held = random
            case 0x15:
                at += yes if held == value else no
            case 0x35:
                at += yes if held >= value else no
            case 0x06:
                return value != 0
            case _:
                raise AssertionError(f"instruction {code:#x}")


@pytest.mark.parametrize(
    ("protocol", "source", "destination", "random", "chosen"),
    [
        (6, 7001, 50_000, 0, True),
        (6, 50_000, 7002, 0, True),
        (6, 50_000, 7002, 0xFFFFFFFE, False),
        (6, 50_000, 50_001, 0, False),
        (17, 7001, 7002, 0, False),
    ],
)
def test_which_packets_of_control_links_vanish(
    protocol: int, source: int, destination: int, random: int, chosen: bool
) -> None:
    program = classifier([7001, 7002], 0.5)
    assert int(program.split(",")[0]) == program.count(",")
    assert says(program, Packet(protocol, source, destination), random) is chosen


def test_what_is_filtered_vanishes_or_waits() -> None:
    gone, late = (
        " ".join(list(made)[-1]) for made in (vanishing("x", [1], 1), narrow("x", [1], 8))
    )
    assert gone.endswith("pfifo limit 0")
    assert "bfifo" in late
    with pytest.raises(ValueError, match="no ports"):
        list(vanishing("x", [], 1))


@pytest.mark.parametrize("secret", [False, True])
def test_who_holds_another_secret_comes_where_there_is_one(secret: bool) -> None:
    kinds = parse(["--secret"] if secret else []).kinds
    assert set(KINDS) - set(kinds) == (set() if secret else {"intruder"})


def test_arguments() -> None:
    options = parse(["--minutes", "10", "--kinds", "cut,kill", "--plot", "x.svg"])
    assert (options.minutes, options.kinds, options.plot) == (10, ("kill", "cut"), Path("x.svg"))


@pytest.mark.parametrize(
    ("way", "began_s", "ended_s", "explained"),
    [
        (FIRST, 9.0, 11.0, True),
        (FIRST, 14.0, 16.0, True),
        (FIRST, 15.0 + AFTERMATH_S, 36.0, True),
        (FIRST, 15.1 + AFTERMATH_S, 36.0, False),
        (FIRST, 8.0, 9.0, False),
        (SECOND, 11.0, 12.0, False),
        ("router", 11.0, 12.0, True),
        ("router", 8.0, 9.0, False),
    ],
)
def test_what_explains_a_failure(way: str, began_s: float, ended_s: float, explained: bool) -> None:
    failed = outcome(way, began_s, ended_s, "failed", "peer is gone")
    assert unexplained([failed], [FROZEN], WAYS) == ([] if explained else [failed])


def test_what_must_not_be() -> None:
    assert result().faults_found() == []
    bad = result(
        outcome(FIRST, 1.0, 2.0, "wrong"),
        outcome(FIRST, 1.0, 61.0, "late"),
        outcome(SECOND, 11.0, 12.0, "failed", "no reason that holds"),
        outcome(FIRST, 11.0, 12.0, "failed", " "),
        leaked_pages={"decode-1": 3, "decode-0": 0},
        held={"prefill-1": ["process 7: 12 threads, then 13"], "decode-0": []},
    ).faults_found()
    assert bad == [
        "1 requests answered with wrong tokens",
        "1 requests past its deadline",
        f"a request over {SECOND} failed, which no fault explains: no reason that holds",
        f"a request over {FIRST} failed without a cause",
        "decode-1: 3 pages leaked",
        "prefill-1: process 7: 12 threads, then 13",
    ]


def test_a_run_without_answers_is_bad() -> None:
    empty = Result(0, 0.0, 1.0, WAYS, (), ())
    assert empty.faults_found() == ["no request was answered"]


#: A fault of the first pair that was alone: 5 s before it, 7 s of it, 5 s after.
ALONE = replace(FROZEN, quiet=(Window(4.0, 9.0), Window(18.0, 23.0)))


def spread(begin_s: float, end_s: float, count: int) -> list[Outcome]:
    step_s = (end_s - begin_s) / count
    ends = [begin_s + n * step_s for n in range(count)]
    return [outcome(pair_name(1), at_s - 0.1, at_s, "equal") for at_s in ends]


@pytest.mark.parametrize(("answered", "bad"), [(70, []), (64, []), (60, ["0.86"])])
def test_the_pair_without_the_victim_keeps_its_rate(answered: int, bad: list[str]) -> None:
    # 10 answers a second without the fault.
    quiet = [*spread(4.0, 9.0, 50), *spread(18.0, 23.0, 50)]
    victims = [outcome(FIRST, 11.0, 12.0, "equal")] * 50
    found = result(*quiet, *spread(10.0, 17.0, answered), *victims, happened=(ALONE,))
    (one,) = found.spared()
    assert (one.expected, one.answered) == (pytest.approx(70), answered)
    said = found.faults_found()
    assert len(said) == len(bad)
    assert all(share in sentence for share, sentence in zip(bad, said, strict=True))


CROSSING = "prefill-0 to decode-1"
#: From 10 to 15 s, and both ways with its victim were asked at once when it was over.
SEVERED = Happened(Fault("sever", "prefill-0", 1.0, 5.0), 10.0, 15.0, 1.5)


def after_severing(*outcomes: Outcome) -> Result:
    crossing = Way(CROSSING, frozenset(("prefill-0", "decode-1")), nobody)
    shown = result(outcome(CROSSING, 15.1, 16.0, "equal"), *outcomes, happened=(SEVERED,))
    return replace(shown, ways=(*WAYS, crossing))


def test_after_every_connection_was_ended_the_first_answer_counts() -> None:
    shown = after_severing(
        outcome(FIRST, 14.9, 15.3, "equal"),  # asked before the way was open
        outcome(FIRST, 15.0, 15.5, "failed", "lost the connection"),
        outcome(FIRST, 15.2, 15.6, "left"),
        outcome(FIRST, 15.3, 18.0, "equal"),
        outcome(FIRST, 15.7, 16.5, "equal"),
        outcome(SECOND, 15.0, 15.1, "equal"),  # the other pair
        outcome("router", 15.0, 15.1, "equal"),  # maybe by the other pair
    )
    (one,) = shown.again()
    assert one.took_s == {FIRST: pytest.approx(1.5), CROSSING: pytest.approx(1.0)}
    assert shown.faults_found() == []
    assert f"{FIRST} after 1.50 s, {CROSSING} after 1.00 s" in text(shown)
    assert as_json(shown)["again"][0]["took_s"] == one.took_s


def test_an_answer_that_comes_late_after_that_is_named() -> None:
    late_s = 15.0 + AGAIN_S["sever"] + 0.1
    shown = after_severing(outcome(FIRST, 15.2, late_s, "equal"))
    assert shown.faults_found() == [
        f"{SEVERED.fault}: over {FIRST} the first answer came 2.10 s after the way was open"
    ]


def test_of_other_faults_and_of_lost_victims_no_time_is_asked() -> None:
    lost = replace(SEVERED, lost="requests still fail")
    assert result(happened=(FROZEN, lost)).again() == []


def test_few_answers_tell_nothing_of_a_rate() -> None:
    few = int(ANSWERS_MIN * 10 / 7) - 2
    quiet = [*spread(4.0, 9.0, few // 2), *spread(18.0, 23.0, few // 2)]
    assert result(*quiet, happened=(ALONE,)).faults_found() == []


def test_nobody_may_be_let_in() -> None:
    got = replace(FROZEN, let_in=("the registry tells of 1 ranks",))
    assert result(happened=(got,)).faults_found() == [
        "freeze prefill-0 for 5.0 s: the registry tells of 1 ranks"
    ]


def test_a_victim_that_does_not_come_back_is_named() -> None:
    lost = result(happened=(replace(FROZEN, lost="requests still fail: no answer"),))
    assert lost.faults_found() == ["freeze prefill-0 for 5.0 s: requests still fail: no answer"]
    assert "has not served again" in text(lost)


def test_a_registry_that_dies_explains_no_failure() -> None:
    died = Happened(Fault("registry-dies", REGISTRY, 1.0, 5.0), 10.0, 15.0, 0.0)
    for way in (FIRST, "router"):
        failed = outcome(way, 11.0, 12.0, "failed", "no instance")
        assert unexplained([failed], [died], WAYS) == [failed]


def test_causes_are_counted_without_their_numbers() -> None:
    failed = [
        outcome(FIRST, 11.0, 12.0, "failed", f"room {n} of {n:032x} timed out") for n in range(3)
    ]
    assert result(*failed).causes() == {"room N of N timed out": 3}


def test_what_processes_hold_more_is_said() -> None:
    before = {"scheduler": Held(10, Counter(socket=4, file=2)), "leader": Held(3, Counter())}
    many = 11 + POOLED_THREADS
    after = {"scheduler": Held(many, Counter(socket=6, file=1), 2), "x": Held(9, Counter(socket=9))}
    assert grown(before, after) == [
        f"scheduler: 10 threads, then {many}",
        "scheduler: 0 pieces of shared memory, then 2",
        "scheduler: 4 descriptors of socket, then 6",
        "x: a process that was not there before",
    ]
    assert grown(before, before) == []


def test_shared_memory_counts_once() -> None:
    maps = [
        "7f00-7f01 r--s 00000000 00:1a 7 /dev/shm/one",
        "7f01-7f02 rw-s 00001000 00:1a 7 /dev/shm/one",
        "7f02-7f03 rw-s 00000000 00:01 8 /memfd:te (deleted)",
        "7f03-7f04 r-xp 00000000 fe:00 9 /usr/lib/libc.so",
        "7f04-7f05 rw-p 00000000 00:00 0",
    ]
    assert shared_in(maps) == 2


@pytest.mark.slow
def test_a_stranger_comes_to_all_ports_and_leaves_in_time() -> None:
    heard: set[int] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.add(writer.get_extra_info("sockname")[1])
        writer.write(b"x")
        writer.close()

    async def meet() -> None:
        async with AsyncExitStack() as stack:
            servers = [
                await stack.enter_async_context(await asyncio.start_server(answer, "127.0.0.1", 0))
                for _ in range(2)
            ]
            ports = [server.sockets[0].getsockname()[1] for server in servers]
            made = 0
            async with asyncio.timeout(60.0):
                # This process may be held for all of the time that one attack lasts.
                while heard != set(ports) or made <= 2:
                    made += await attack("127.0.0.1", ports, seed=1, lasts_s=1.0)

    asyncio.run(meet())


def test_what_a_run_prints_writes_and_draws() -> None:
    failed = outcome(FIRST, 11.0, 12.0, "failed", "the peer <prefill-0> answers nothing")
    shown = result(failed)
    printed = text(shown)
    assert "10.0 s  freeze        prefill-0    5.0 s, served again 2.00 s later" in printed
    assert "1 failed with a cause" in printed
    assert "1 the peer <prefill-N> answers nothing" in printed
    assert printed.endswith("nothing that must not be")
    document = json.loads(json.dumps(as_json(shown)))
    assert document["bad"] == []
    assert document["faults"][0]["victim"] == "prefill-0"
    assert len(document["requests"]) == 4
    drawn = ElementTree.fromstring(svg(shown))
    titles = [one.text or "" for one in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert any("the peer <prefill-0> answers nothing" in title for title in titles)
    words = [one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"freeze prefill-0", "0 min", *(way.name for way in WAYS)} <= set(words)
