# SPDX-License-Identifier: Apache-2.0
"""What layer by layer relies on within SGLang, and what becomes of it without."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


def test_the_installed_sglang_has_all_that_is_relied_on():
    from sglang_mooncake.sglang.layerwise.internals import KNOWN_POOLS, missing

    assert missing() is None
    for name in KNOWN_POOLS:
        module, _, cls = name.rpartition(".")
        assert isinstance(getattr(__import__(module, fromlist=[cls]), cls), type)


def test_with_any_of_it_missing_the_feature_is_off_and_says_so(monkeypatch, caplog):
    from sglang_mooncake.sglang.layerwise import Layerwise, internals

    lacking = []
    for internal in internals.INTERNALS:
        lacking.append(dataclasses.replace(internal, name=f"{internal.name}Gone"))
        lacking.append(dataclasses.replace(internal, module=f"{internal.module}.gone"))
        for kind in ("parameters", "uses", "fields"):
            lacking += [
                dataclasses.replace(internal, **{kind: (f"{name}_gone",)})
                for name in getattr(internal, kind)
            ]
    assert len(lacking) > 40
    for one in lacking:
        monkeypatch.setattr(internals, "INTERNALS", (one,))
        sink: Any = SimpleNamespace(fell_back=lambda reason: None)
        caplog.clear()
        assert not Layerwise(sink, sink, 1, has_streams=False).install()
        assert len(caplog.records) == 1
        assert str(one) in caplog.text
        assert "gone" in caplog.text.lower()


def test_a_class_in_the_place_of_a_function_is_not_what_is_relied_on(monkeypatch):
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_mooncake.sglang.layerwise.internals import missing

    monkeypatch.setattr(Scheduler, "run_batch", object())
    assert "run_batch that is a function" in missing()


def test_caches_without_layers_are_served_the_old_way():
    from sglang_mooncake.sglang.layerwise import Layerwise, hooks

    sink: Any = SimpleNamespace(by_layers=False, fell_back=lambda reason: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "mode_in_the_way", lambda: None)
        made = Layerwise(sink, sink, 1, has_streams=False)
        assert not made.install()
    assert "told apart by layers" in made.off
