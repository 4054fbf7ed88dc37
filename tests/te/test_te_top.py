# SPDX-License-Identifier: Apache-2.0
"""What ``te top`` makes of two looks at engines, and how it sets that on a screen."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from te.stats import (
    EngineStatus,
    FenceStats,
    LinkStats,
    Outcomes,
    RailFlow,
    RailStats,
    Stats,
    TransportStats,
)
from te.top.lines import Kind, crop, lines, size
from te.top.rates import Rate, Sample, rows

pytestmark = pytest.mark.pure

NONE = Outcomes(0, 0, 0, {}, 0, 0, 0)
GB = 10**9


def rail(sent: int, received: int = 0, **more: object) -> RailStats:
    return RailStats("mlx5_0 → mlx5_1", "up", RailFlow(sent, received), **more)  # type: ignore[arg-type]


def link(peer: str, *rails: RailStats, **more: object) -> LinkStats:
    made = LinkStats(peer, "10.0.0.2:4000", False, "rdma", "", "", 5e10, rails, 0, NONE, "")
    return replace(made, **more)  # type: ignore[arg-type]


def engine(name: str, *links: LinkStats, pid: int = 7) -> EngineStatus:
    flows = [one.flow for each in links for one in each.rails]
    stats = Stats(
        sum(one.bytes_sent for one in flows),
        sum(one.bytes_received for one in flows),
        *(12, 3, 0),
        peers=len(links),
        rails=len(flows),
        transports=("rdma", "tcp"),
        peer_transports={},
        peer_bytes_per_s={},
        by_transport={},
        fences=FenceStats(0, 0.0, 0),
        connects=1,
        connects_fallen_back=0,
        registered_bytes={"cuda:0": 3 * GB},
    )
    return EngineStatus(name, pid, "python -m sglang.launch_server", "h", 1, stats, links)


# -- rates


def test_a_rate_is_what_the_counters_rose_by_in_the_time() -> None:
    before = Sample(10.0, (engine("a", link("p", rail(100), rail(50, 10))),))
    after = Sample(12.0, (engine("a", link("p", rail(300), rail(50, 30))),))
    (found,) = rows(before, after)
    assert found.rate == found.links[0].rate == Rate(100.0, 10.0)
    assert [one.rate for one in found.links[0].rails] == [Rate(100.0, 0.0), Rate(0.0, 10.0)]
    assert [one.number for one in found.links[0].rails] == [0, 1]


def test_at_the_first_look_there_are_no_rates() -> None:
    (found,) = rows(None, Sample(1.0, (engine("a", link("p", rail(100))),)))
    assert (found.rate, found.links[0].rate, found.links[0].rails[0].rate) == (None, None, None)


def test_looks_at_the_same_time_have_no_rates() -> None:
    one = Sample(1.0, (engine("a", link("p", rail(100))),))
    assert rows(one, one)[0].rate is None


def test_a_peer_that_connected_anew_has_no_rate_yet() -> None:
    """Its link counts from 0; the engine's sums go on."""
    old, new = engine("a", link("p", rail(500))), engine("a", link("p", rail(20)))
    new = replace(new, stats=replace(new.stats, bytes_sent=520))
    (found,) = rows(Sample(1.0, (old,)), Sample(2.0, (new,)))
    assert (found.rate, found.links[0].rate) == (Rate(20.0, 0.0), None)


def test_what_was_not_there_before_has_no_rate() -> None:
    before = Sample(1.0, (engine("a", link("p", rail(1)), link("q", rail(1))),))
    more = engine("a", link("p", rail(1), rail(9)), link("r", rail(5)))
    after = Sample(2.0, (more, engine("b", link("p", rail(7)))))
    found = {one.status.id: one for one in rows(before, after)}
    assert found["b"].rate is None
    links = {one.stats.peer: one for one in found["a"].links}
    assert [one.rate for one in links["p"].rails] == [Rate(0.0, 0.0), None]
    assert links["p"].rate is links["r"].rate is None


def test_directions_of_one_peer_are_told_apart() -> None:
    def both(sent: int, received: int) -> EngineStatus:
        incoming = link("p", rail(0, received), is_incoming=True, address="10.0.0.2:5000")
        return engine("a", link("p", rail(sent)), incoming)

    (found,) = rows(Sample(0.0, (both(50, 900),)), Sample(1.0, (both(55, 909),)))
    assert [one.rate for one in found.links] == [Rate(0.0, 9.0), Rate(5.0, 0.0)]


def test_the_fastest_come_first_and_then_those_with_the_most_bytes() -> None:
    def at(a: int, b: int, c: int, d: int) -> Sample:
        one = engine("one", link("a", rail(a)), link("b", rail(b)), link("c", rail(c)))
        return Sample(float(a), (one, engine("two", link("d", rail(d)))))

    found = rows(at(0, 100, 300, 0), at(1, 100, 300, 50))
    assert [one.status.id for one in found] == ["two", "one"]
    assert [one.stats.peer for one in found[1].links] == ["a", "c", "b"]


# -- lines


def table(*engines: EngineStatus, width: int | None = None) -> list[tuple[Kind, str]]:
    """As one second after all counters were 0."""
    zero = [
        engine(one.id, *(replace(each, rails=tuple(map(zeroed, each.rails))) for each in one.links))
        for one in engines
    ]
    return lines(rows(Sample(0.0, tuple(zero)), Sample(1.0, engines)), ["a problem"], width)


def zeroed(one: RailStats) -> RailStats:
    return replace(one, flow=RailFlow(0, 0))


def busy() -> EngineStatus:
    """With all that a table can tell."""
    down = rail(5_000_000, bytes_in_flight=64_000, reason="the port went down")
    one = engine(
        "0123456789abcdef",
        link(
            "fedcba9876543210",
            rail(2 * GB),
            replace(down, state="down"),
            transport="tcp",
            transport_reason="rdma: no devices",
            encrypted_by="kernel",
            transfers_unfinished=4,
            outcomes=Outcomes(8, 80, 800, {"stalled": 2, "broke": 1}, 0, 0, 0),
        ),
        link("aaaabbbbccccdddd", rail(0, 1_000), is_incoming=True),
    )
    lost = TransportStats(0, 0, (), NONE, {}, rails_lost=3, rails_remade=2)
    stats = replace(one.stats, by_transport={"rdma": lost}, fences=FenceStats(5, 0.1, 1))
    return replace(one, stats=stats)


def test_a_table_tells_everything() -> None:
    assert [(kind.value, " ".join(text.split())) for kind, text in table(busy())] == [
        ("head", "state out/s in/s sent received in flight done failed"),
        (
            "engine",
            (
                "pid 7 python -m sglang.launch_server engine 01234567"
                " 2.00 GB 1.00 kB 2.00 GB 1.00 kB 4 12 3"
            ),
        ),
        (
            "note",
            (
                "h:1; offers rdma, tcp; memory: 3.00 GB of cuda:0; 5 fences, 1 late;"
                " 3 rails lost, 2 made anew"
            ),
        ),
        (
            "link",
            "→ fedcba98 at 10.0.0.2:4000 tcp, encrypted by kernel 2.00 GB 0 B 2.00 GB 0 B 4 8 3",
        ),
        ("rail", "0 mlx5_0 → mlx5_1 up 2.00 GB 0 B 2.00 GB 0 B"),
        ("bad", "1 mlx5_0 → mlx5_1 down 5.00 MB 0 B 5.00 MB 0 B 64.0 kB"),
        ("note", "not by rdma: no devices"),
        ("bad", "transfers failed: broke 1, stalled 2"),
        ("bad", "rail 1 went down: the port went down"),
        ("link", "← aaaabbbb at 10.0.0.2:4000 rdma 0 B 1.00 kB 0 B 1.00 kB 0 0 0"),
        ("rail", "0 mlx5_0 → mlx5_1 up 0 B 1.00 kB 0 B 1.00 kB"),
        ("bad", "a problem"),
    ]


def test_figures_stand_below_their_heads() -> None:
    text = [one for _, one in table(busy())]
    end = text[0].index("out/s") + len("out/s")
    for line in (text[1], text[3], text[4], text[5]):
        assert line[:end].endswith(("GB", "MB"))


@pytest.mark.parametrize("width", [1, 10, 40, 60, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    found = [text for _, text in table(busy(), width=width)]
    assert max(map(len, found)) <= width
    assert len(found) == len(table(busy()))
    assert ("out/s" in found[0]) == (width >= 40)


def test_totals_go_before_rates_on_a_narrow_terminal() -> None:
    heads = [table(busy(), width=width)[0][1].split() for width in (200, 110, 100, 80, 60)]
    assert [len(one) for one in heads] == sorted((len(one) for one in heads), reverse=True)
    assert heads[0] == [
        "state",
        "out/s",
        "in/s",
        "sent",
        "received",
        "in",
        "flight",
        "done",
        "failed",
    ]
    assert len({len(one) for one in heads}) > 2
    assert all({"out/s", "in/s"} <= set(one) for one in heads)
    assert all(("sent" in one) == ("received" in one) for one in heads)


def test_what_has_no_rate_shows_a_dash() -> None:
    text = lines(rows(None, Sample(0.0, (busy(),))), (), None)
    assert text[1][1].split("01234567")[1].split()[:2] == ["–", "–"]


def test_what_a_process_calls_itself_cannot_command_the_terminal() -> None:
    one = replace(busy(), process="x\x1b[2J\nfine\u202e")
    assert "x?[2J" in table(one)[1][1]
    assert all(text.isprintable() for _, text in table(one))


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("sglang::scheduler_TP0", "sglang::scheduler_TP0"),
        ("/usr/bin/python3 -u -m sglang.launch_server --port 3", "python3 -m sglang.launch_server"),
        ("python3.12 /home/a/serve.py -m x", "serve.py"),
        ("python -c import te", "python -c"),
        ("python", "python"),
        ("python -u", "python"),
        ("", "?"),
    ],
)
def test_a_process_has_a_short_name(command: str, shown: str) -> None:
    assert f"pid 7  {shown}  engine" in table(replace(busy(), process=command))[1][1]


def test_what_the_application_calls_its_engine_stands_for_the_program() -> None:
    one = replace(busy(), label="prefill of m,\x1b[2J port 30000")
    assert "pid 7  prefill of m,?[2J port 30000  engine 01234567" in table(one)[1][1]


# -- where there is no room for all


def many(engines: int, links: int, rails: int) -> list[EngineStatus]:
    """Each has links that are faster than those of the one before; all links differ."""
    return [
        engine(
            f"{i:08x}",
            *(
                link(f"{i:04x}{j:04x}", *(rail(1 + i * GB + j * 1_000) for _ in range(rails)))
                for j in range(links)
            ),
            pid=i,
        )
        for i in range(engines)
    ]


def bounded(engines: list[EngineStatus], most: int, problems: int = 0) -> list[str]:
    told = [f"problem {i}" for i in range(problems)]
    zero = tuple(replace(one, links=(), stats=engine(one.id).stats) for one in engines)
    found = rows(Sample(0.0, zero), Sample(1.0, tuple(engines)))
    return [text for _, text in lines(found, told, None, most)]


@pytest.mark.slow
@given(
    st.integers(0, 40), st.integers(1, 12), st.integers(1, 20), st.integers(0, 30),
    st.integers(10, 80),
)  # fmt: skip
def test_a_bounded_table_has_no_more_lines_and_says_what_is_missing(
    engines: int, links: int, rails: int, problems: int, most: int
) -> None:
    found = bounded(many(engines, links, rails), most, problems)
    assert len(found) <= most
    shown = [line for line in found if line.startswith("pid ")]
    assert [int(line.split()[1]) for line in shown] == [*reversed(range(engines))][: len(shown)]
    missing = [line for line in found if line.startswith("… ") and "engines" in line]
    assert len(missing) == (len(shown) < engines)
    for line in missing:
        assert str(engines - len(shown)) in line.split()
    of_links = sum("→ " in line and " at " in line for line in found)
    left_out = [re.match(r"  … (\d+)(?: more)? links", line) for line in found]
    assert of_links + sum(int(one[1]) for one in left_out if one) == links * len(shown)


def test_the_busiest_links_of_all_engines_are_shown() -> None:
    found = bounded(many(3, 9, 1), 20)
    assert [line.split()[1] for line in found if "→ " in line and " at " in line] == [
        "00020008", "00020007", "00020006", "00020005", "00020004",
    ]  # fmt: skip
    assert [line for line in found if "…" in line] == [
        "  … 4 more links", "  … 9 links", "  … 9 links",
    ]  # fmt: skip


def test_lines_for_which_there_is_no_room_are_counted() -> None:
    text = [(Kind.NOTE, str(i)) for i in range(5)]
    assert crop(text, 5) == text
    assert crop(text, 3) == [*text[:2], (Kind.NOTE, "… 3 more lines")]
    assert crop(text, 1) == crop(text, 0) == [(Kind.NOTE, "… 5 more lines")]


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"), (999, "999 B"), (999.6, "1.00 kB"), (1000, "1.00 kB"), (9_990, "9.99 kB"),
        (10_000, "10.0 kB"), (99_960, "100 kB"), (123_456, "123 kB"), (999_600, "1.00 MB"),
        (5e9, "5.00 GB"), (48.2e9, "48.2 GB"), (3e15, "3000 TB"),
    ],
)  # fmt: skip
def test_bytes_have_three_digits(nbytes: float, shown: str) -> None:
    assert size(nbytes) == shown
