# SPDX-License-Identifier: Apache-2.0
"""From what ranks tell to a timeline, as text and as a drawing."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bootstrap_server import Why
from sglang_mooncake.explain.drawing import COLOURS, as_svg
from sglang_mooncake.explain.questions import RankStories
from sglang_mooncake.explain.text import as_text, refused_text, size_text, time_text
from sglang_mooncake.explain.timeline import _ADVICE, ARRIVAL, timelines, verdict
from sglang_mooncake.refused import RefusedServer
from sglang_mooncake.rooms.write_story import WriteStory
from sglang_mooncake.story import STAGES, RoomStory

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = """]]></svg><script>alert("1")</script>&'"""
#: It clears a terminal, and no file in XML may hold it.
CONTROL = "\x1b[2J\n"


def told(*stories, rank="decode rank 0", role="decode", boot_id="one", wall_s=1000.0, at_s=50.0):
    return RankStories(
        rank, role, 1, f"host-{boot_id}", boot_id, wall_s, at_s, len(stories), None, stories
    )


def decode_story(room=7, began_s=10.0, serial=1, **changes):
    marks = {
        "bootstrap": began_s + 0.1,
        "queued": began_s + 0.2,
        "planned": began_s + 0.2,
        "landed": began_s + 0.9,
        "acknowledged": began_s + 1.0,
    }
    fields = {"over_s": began_s + 1.0, "marks": marks, "end": "done", "pages": 4, "nbytes": 4096}
    return RoomStory(room, serial, "decode", "decode rank 0", began_s, **(fields | changes))


def prefill_story(room=7, began_s=10.05, serial=1, rank="prefill rank 0", **changes):
    marks = {
        "bootstrap": began_s + 0.15,
        "queued": began_s + 0.65,
        "planned": began_s + 0.66,
        "posted": began_s + 0.67,
        "acknowledged": began_s + 0.80,
    }
    write = WriteStory("decode rank 0", "rdma", began_s + 0.67, began_s + 0.80, 4096, 8, 4)
    fields = {
        "over_s": began_s + 0.8,
        "marks": marks,
        "end": "done",
        "pages": 4,
        "nbytes": 4096,
        "writes": (write,),
    }
    return RoomStory(room, serial, "prefill", rank, began_s, **(fields | changes))


def test_ranks_of_one_host_share_its_clock_whenever_they_answer():
    (line,) = timelines(
        [
            told(decode_story()),
            # It answered later, after the wall clock had been set back.
            told(prefill_story(), rank="prefill rank 0", role="prefill", wall_s=900.0, at_s=60.0),
        ]
    )
    assert line.is_one_clock
    assert [(lane.rank, round(lane.began_s, 6)) for lane in line.lanes] == [
        ("decode rank 0", 0.0),
        ("prefill rank 0", 0.05),
    ]
    assert line.duration_s == pytest.approx(1.0)
    spans = line.lanes[1].spans
    assert [name for name, _, _ in spans] == [
        ARRIVAL, "bootstrap", "queued", "planned", "posted", "acknowledged",
    ]  # fmt: skip
    assert spans[0][1:] == pytest.approx((0.0, 0.05))
    assert spans[1][1] == pytest.approx(0.05)
    assert line.lanes[0].spans[0][0] == "bootstrap"
    assert spans[-1][1] + spans[-1][2] == pytest.approx(0.85)


def test_ranks_of_two_hosts_are_aligned_by_their_wall_clocks():
    far = prefill_story(began_s=77_010.25)
    (line,) = timelines(
        [
            told(decode_story()),  # it began 40 s before 1,000.0
            told(
                far,
                rank="prefill rank 0",
                role="prefill",
                boot_id="two",
                wall_s=960.45,
                at_s=77_010.45,
            ),
        ]
    )
    assert not line.is_one_clock
    assert line.lanes[1].began_s == pytest.approx(0.25)
    assert "as exact as those are synchronised" in as_text(line)


def test_several_uses_of_a_room_number_are_several_timelines():
    lines = timelines(
        [
            told(decode_story(began_s=10.0), decode_story(began_s=30.0, serial=2)),
            told(
                prefill_story(began_s=30.1, serial=9),
                prefill_story(began_s=10.1, serial=3),
                rank="prefill rank 0",
                role="prefill",
            ),
            told(decode_story(room=8, began_s=20.0, serial=5), rank="decode rank 1"),
        ]
    )
    assert [line.room for line in lines] == [7, 8, 7]
    assert [len(line.lanes) for line in lines] == [2, 1, 2]
    assert [lane.story.serial for lane in lines[2].lanes] == [2, 9]


def test_the_text_has_every_stage_and_says_where_to_look():
    text = as_text(
        timelines(
            [told(decode_story()), told(prefill_story(), rank="prefill rank 0", role="prefill")]
        )[0]
    )
    assert text.startswith("room 7: done, 1.00 s on 2 ranks of 1 host\n")
    for stage in STAGES:
        assert f"  {stage}" in text
    assert "write at 720.00 ms to decode rank 0 over rdma: 4 pages, 4.0 KiB in 8 blocks" in text
    assert "Longest: queued on prefill rank 0, 500.00 ms (50%).\nThe request waited in SGL" in text


def test_a_decode_rank_that_waits_is_told_to_ask_the_prefill_ranks_host():
    (line,) = timelines([told(decode_story())])
    lane, stage, spent_s, where_to_look = verdict(line)
    assert (lane.role, stage) == ("decode", "landed")
    assert spent_s == pytest.approx(0.7)
    assert "Ask the hosts of the prefill ranks, too (--on)" in where_to_look


def test_a_failed_and_an_open_room_say_so():
    failed = decode_story(end="failed", reason="the peer died", marks={"bootstrap": 10.1})
    (line,) = timelines([told(failed)])
    assert line.problem == "the peer died"
    assert "room 7: failed, 1.00 s" in as_text(line)
    assert "It failed: the peer died" in as_text(line)
    still = decode_story(end="requested", is_open=True, marks={"bootstrap": 10.1})
    assert "(not over yet)" in as_text(timelines([told(still)])[0])


def test_there_is_advice_for_every_stage_that_a_role_has():
    for role, left_out in (("prefill", "landed"), ("decode", "posted")):
        stages = set(STAGES) - {left_out} | {ARRIVAL}
        assert {stage for who, stage in _ADVICE if who == role} == stages


@pytest.mark.parametrize("boot_id", ["one", "two"])
def test_the_wait_before_prefill_had_the_request_is_named(boot_id):
    """The decode rank waited all that time, and no stage of the prefill rank was long."""
    late = prefill_story(began_s=10.7, over_s=10.95, marks={"bootstrap": 10.71, "queued": 10.8})
    answers = [
        told(decode_story()),
        told(late, rank="prefill rank 0", role="prefill", boot_id=boot_id),
    ]
    (line,) = timelines(answers)
    text = as_text(line)
    assert "  arrival           0 µs 700.00 ms  |############################            |" in text
    assert "Longest: arrival on prefill rank 0, 700.00 ms (70%).\nA decode rank had the" in text
    assert ("Or the clocks of the hosts differ" in text) == (boot_id == "two")
    assert "longest: arrival, 700.00 ms" in as_svg([line])


def test_the_drawing_is_well_formed_whatever_ranks_are_called():
    told_of = [
        told(decode_story(), rank=HOSTILE + CONTROL),
        told(prefill_story(), rank=HOSTILE + "2", role="prefill"),
    ]
    root = ET.fromstring(as_svg(timelines(told_of)))
    assert root.tag == f"{SVG}svg"
    assert not root.findall(f".//{SVG}script")
    texts = [one.text or "" for one in root.iter(f"{SVG}text")]
    assert any(HOSTILE in text for text in texts)
    fills = [one.get("fill") for one in root.iter(f"{SVG}rect")]
    assert set(COLOURS.values()) <= set(fills)


def test_what_others_have_told_commands_no_terminal():
    write = WriteStory("d" + CONTROL, "tcp" + CONTROL, 10.1, 10.2, 1, 1, 1)
    story = decode_story(reason="x" + CONTROL, writes=(write,), peers=("p" + CONTROL,))
    text = as_text(timelines([told(story, rank="r" + CONTROL)])[0])
    assert text.count("?[2J?") >= 5
    assert all(line.isprintable() for line in text.splitlines())


@given(
    st.lists(st.floats(0, 1e4), min_size=5, max_size=5),
    st.floats(0, 1e6),
    st.integers(0, 80),
    st.integers(1, 3),
)
def test_every_bar_lies_within_the_drawing(lengths, began_s, writes, requests):
    marks, at_s = {}, began_s
    for stage, length_s in zip(("bootstrap", "queued", "planned", "posted"), lengths, strict=False):
        at_s = marks[stage] = at_s + length_s
    write = WriteStory("d", "tcp", began_s, at_s, 1, 1, 1)
    story = prefill_story(
        began_s=began_s, over_s=at_s + lengths[-1], marks=marks, writes=(write,) * writes
    )
    (line,) = timelines([told(story, rank="prefill rank 0", role="prefill")])
    root = ET.fromstring(as_svg([line] * requests))
    width, height = float(root.get("width") or 0), float(root.get("height") or 0)
    for bar in root.iter(f"{SVG}rect"):
        x, y = float(bar.get("x", 0)), float(bar.get("y", 0))
        assert 0 <= x <= x + float(bar.get("width", 0)) <= width + 2
        assert 0 <= y <= y + float(bar.get("height", 0)) <= height
    assert "room 7" in as_text(line)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 µs"), (2e-6, "2 µs"), (0.0015, "1.50 ms"), (2.5, "2.50 s"), (61.0, "61.0 s")],
)
def test_times_are_told_in_their_unit(value, text):
    assert time_text(value) == text


def test_sizes_are_told_in_their_unit():
    assert [size_text(n) for n in (0, 2048, 3 << 20, 5 << 30)] == [
        "0 bytes", "2.0 KiB", "3.0 MiB", "5.0 GiB",
    ]  # fmt: skip


PREFILL = "prefill rank (dp 0 cp 0 tp 0 pp 0) at"


@pytest.mark.parametrize(
    ("host", "peer"),
    [("10.0.0.1", "10.0.0.1:7650"), ("fd00::1", "[fd00::1]:7650"), ("prefill-0", "prefill-0:1")],
)
def test_ranks_that_took_part_and_have_not_told_are_named(host, peer):
    decode = told(decode_story(peers=(f"{PREFILL} {peer}",)))
    (line,) = timelines([decode])
    assert line.absent == (f"{PREFILL} {host}",)
    assert f"Not shown: {PREFILL} {host}. These ranks took part" in as_text(line)
    prefill = told(
        prefill_story(rank=f"{PREFILL} {host}", peers=("decode rank 0",)),
        rank=f"{PREFILL} {host}",
        role="prefill",
    )
    (line,) = timelines([decode, prefill])
    assert line.absent == ()
    assert "Not shown" not in as_text(line)


def test_of_many_that_have_not_told_the_first_are_named():
    (line,) = timelines([told(decode_story(peers=tuple(f"{PREFILL} h{i}:1" for i in range(9))))])
    assert f"{PREFILL} h3 and 5 more. These" in as_text(line)


def test_servers_that_serve_no_request_are_named_once_though_several_ranks_say_so():
    sentence = f"page_size is 16 on prefill and 1 on decode{CONTROL}"
    server = RefusedServer("10.0.0.1:8998", Why.PAGE_SIZE, sentence, since_s=940.0)
    ranks = [
        structs.replace(told(decode_story(), rank=f"decode rank {tp}"), refused=(server,))
        for tp in range(2)
    ]
    assert refused_text(ranks) == (
        "Now, for 60.0 s: 10.0.0.1:8998 and decode ranks serve no request together (page size): "
        "page_size is 16 on prefill and 1 on decode?[2J?"
    )
    assert refused_text([told(decode_story())]) == ""
