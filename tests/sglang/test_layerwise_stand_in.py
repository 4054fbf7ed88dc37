# SPDX-License-Identifier: Apache-2.0
"""What the shim does to servers that hand KV over layer by layer: the negative controls, and layers
that leave early although nothing is gained."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from cpu_serving.layerwise import Layerwise, layers_announced_early, layers_left_out
from cpu_serving.servers import SHIM

pytestmark = pytest.mark.sglang

POOL = "sglang.srt.mem_cache.memory_pool"


@pytest.fixture
def shim(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SHIM))
    import cpu_layers

    yield cpu_layers
    for name in ("cpu_layers", "cpu_published"):
        sys.modules.pop(name)


def environment(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
    has_streams = options.pop("has_streams", False)
    given = Layerwise(**options).environment("prefill", folder, has_streams=has_streams)
    assert given["SGLANG_MOONCAKE_LAYERWISE"] == "1"
    for name, value in given.items():
        monkeypatch.setenv(name, value)


def test_nothing_happens_unless_asked_for(shim, tmp_path):
    assert Layerwise().environment("decode", tmp_path, has_streams=False) == {}
    assert shim.install() == {}


def test_the_pool_is_published_once(shim, tmp_path, monkeypatch):
    environment(tmp_path, monkeypatch)
    assert POOL in shim.install()
    environment(tmp_path, monkeypatch, has_streams=True)
    assert POOL not in shim.install(), "overlap scheduling has done so, in the order of streams"


def test_layers_are_announced_too_early_in_the_control_alone(shim, tmp_path, monkeypatch):
    told = []

    class PrefillSide:
        def send_layers(self, room, pages, first, below, events=()):
            told.append((room, pages, first, below, events))

    environment(tmp_path, monkeypatch)
    shim.install()["sglang_mooncake.prefill_side"](SimpleNamespace(PrefillSide=PrefillSide))
    side = PrefillSide()
    side.send_layers("view", [7], 3, 2, ("event",))
    with layers_announced_early(tmp_path):
        side.send_layers("view", [7], 3, 2)
    side.send_layers("view", [7], 3, below=2)
    assert told == [
        ("view", [7], 3, 2, ("event",)),
        ("view", [7], 3, 3, ()),
        ("view", [7], 3, 2, ()),
    ]


def test_layers_go_early_where_nothing_is_gained(shim, tmp_path, monkeypatch):
    from sglang_mooncake import layer_groups

    for name in ("WORTH_S", "SHARE_OF_FORWARD"):
        monkeypatch.setattr(layer_groups, name, getattr(layer_groups, name))
    few = (8, 10, 1e12, 1e-6, 1.0)
    environment(tmp_path, monkeypatch)
    assert "sglang_mooncake.layer_groups" not in shim.install()
    assert layer_groups.borders(*few) == ()
    environment(tmp_path, monkeypatch, always=True)
    shim.install()["sglang_mooncake.layer_groups"](layer_groups)
    assert len(layer_groups.borders(*few)) > 2


def test_early_layers_are_left_out_in_the_control_alone(shim, tmp_path, monkeypatch):
    class Plan:
        def part(self, pages, first, named, layers):
            return pages, first, named, layers

    every, early, rest = range(100), range(3), range(3, 100)
    module = SimpleNamespace(Plan=Plan, EVERY_LAYER=every)
    environment(tmp_path, monkeypatch)
    shim.install()["sglang_mooncake.layout.plan"](module)
    plan = Plan()
    assert plan.part([7], 1, "named", early) == ([7], 1, "named", early)
    with layers_left_out(tmp_path):
        assert len(plan.part([7], 1, "named", early)) == 0
        assert plan.part([7], 1, "named", rest) == ([7], 1, "named", rest)
        assert plan.part([7], 1, "named", every) == ([7], 1, "named", every)
