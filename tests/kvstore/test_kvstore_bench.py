# SPDX-License-Identifier: Apache-2.0
"""``kvstore bench`` measures what it says, and notices a store that gives other bytes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from rdma_testbed.packages import ensure_programs

from kvstore.cli import main
from kvstore_tools.bench import command, contenders
from kvstore_tools.bench.command import busy_percent
from kvstore_tools.bench.contenders import Contender, Objects


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SHAPES", ((4096, 2), (100_000, 1)))
    monkeypatch.setattr(command, "LENT_BYTES", 64 << 20)
    monkeypatch.setattr(command, "ASKED", 10)
    monkeypatch.setattr(command, "REST_S", 0.0)
    monkeypatch.setattr(command, "busy_percent", lambda: 90.0)


@pytest.mark.slow
def test_all_of_ours_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    ensure_programs({"redis-server": "redis-server"}, "hosts that meet in a benchmark")
    assert main(["bench", "--rounds", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert "others keep 90 % of the processors busy" in said.err
    figures = json.loads(said.out)
    ours = {"ours", "ours tcp"}
    assert set(figures) == {
        "put 4 KiB × 2",
        "get 4 KiB × 2",
        "put 97 KiB × 1",
        "get 97 KiB × 1",
        "exists 10, M/s",
    }
    for row, each in figures.items():
        assert set(each) == (ours | {"memcpy"} if row.startswith("get") else ours)
        assert min(each.values()) > 0


@pytest.mark.parametrize(("timeout_s", "last"), [(9.0, 20.0), (2.0, 40.0), (0.0, 90.0)])
def test_the_rounds_begin_once_the_processors_have_little_to_do(
    timeout_s: float, last: float
) -> None:
    now_s = 0.0

    def busy() -> float:
        nonlocal now_s
        now_s += 1.0
        return {1.0: 90.0, 2.0: 40.0, 3.0: 20.0}[now_s]

    assert command.await_rest(busy, timeout_s, lambda: now_s) == last


def test_how_busy_the_processors_are_is_told() -> None:
    assert 0.0 <= busy_percent() <= 100.0


def test_the_table_has_a_column_for_each() -> None:
    text = command.table({"put": {"a": 1.0, "b": 12.345}, "get": {"b": 2.0}})
    assert [line.split() for line in text.splitlines()] == [
        ["GB/s", "a", "b"],
        ["put", "1", "12.3"],
        ["get", "2"],
    ]


class Liar(Contender):
    name = "liar"

    def open(self, memory: np.ndarray, lent: int) -> None:
        pass

    def put(self, objects: Objects) -> int:
        return len(objects.names)

    get = put

    def exists(self, names: list[str]) -> int:
        return len(names)

    def remove(self, names: list[str]) -> None:
        pass


def test_other_bytes_than_were_stored_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contenders.CONTENDERS, "ours", (Liar,))
    with pytest.raises(RuntimeError, match="liar gave other bytes than were stored"):
        main(["bench", "--rounds", "1"])


def test_without_redis_one_host_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contenders.shutil, "which", lambda _: None)
    monkeypatch.setitem(contenders.CONTENDERS, "ours", (contenders.OursTcp,))
    monkeypatch.setattr(command, "_measure", lambda found, *_: {"row": dict.fromkeys(found, 1)})
    assert main(["bench", "--json"]) == 0
    said = capsys.readouterr()
    assert "ours tcp is left out: neither redis-server nor valkey-server is installed" in said.err
    assert json.loads(said.out) == {"row": {}}


def test_peers_that_are_unknown_or_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(contenders.CONTENDERS, "ours", ())
    monkeypatch.setattr(contenders, "MOONCAKES", tmp_path)  # The checkout may have it.
    monkeypatch.syspath_prepend(
        tmp_path
    )  # The benchmark adds to the path, and nobody takes it back.
    for name, text in contenders.Mooncake.ENVIRONMENT.items():
        monkeypatch.setenv(name, text)  # The benchmark sets them, and nobody takes them back.
    assert main(["bench", "--peers", "memcached"]) == 2
    assert "unknown peers ['memcached']" in capsys.readouterr().err
    missing = [one for one in ("mooncake", "redis") if importlib.util.find_spec(one) is None]
    assert missing, "the tests' environment has no peers: this would measure them"
    assert main(["bench", "--peers", missing[0]]) == 1
    told = capsys.readouterr().err
    assert f"{missing[0]} is left out: " in told
    assert missing[0] != "mooncake" or "scripts/setup peer mooncake installs it" in told
