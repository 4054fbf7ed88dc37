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
        assert not Layerwise(sink, sink, 1, (), by_position=True, has_streams=False).install()
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
        made = Layerwise(sink, sink, 1, (), by_position=True, has_streams=False)
        assert not made.install()
    assert "told apart by layers" in made.off


#: What a server with one of these flags runs with.
FLAGS: list[dict[str, Any]] = [
    {"pp_size": 2},
    {"enable_two_batch_overlap": True},
    {"enable_pdmux": True},
    {"enable_unified_memory": True},
    {"enable_hisparse": True},
    {"enable_dsa_cache_layer_split": True},
    {"elastic_ep_backend": "mooncake"},
    {"dllm_algorithm": "LowConfidence"},
    {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
]


def give(patch: pytest.MonkeyPatch, internals: Any, **flags: Any) -> None:
    """SGLang's settings as a server has them without flags, but for these."""
    off: dict[str, Any] = dict.fromkeys((name for one in FLAGS for name in one), None)
    off |= {"pp_size": 1, **flags}
    group = SimpleNamespace(**off)
    bag = SimpleNamespace(**off, overlap=group, moe=group, dllm=group, graph=group)
    for name in ("get_disagg", "get_exec", "get_memory", "get_parallel"):
        patch.setattr(internals, name, lambda: bag)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: next(iter(flags)))
def test_in_modes_that_could_carry_wrong_bytes_it_is_off(monkeypatch, flags):
    from sglang_mooncake.sglang.layerwise import Layerwise, internals

    give(monkeypatch, internals)
    assert internals.mode_in_the_way() is None
    (mode,) = flags
    give(monkeypatch, internals, **flags)
    sink: Any = SimpleNamespace(by_layers=True, fell_back=lambda reason: None)
    made = Layerwise(sink, sink, 1, (), by_position=True, has_streams=False)
    assert not made.install()
    assert "does not go together with" in (made.off or ""), mode


def test_a_setting_that_sglang_no_longer_has_turns_it_off(monkeypatch):
    from sglang_mooncake.sglang.layerwise import internals

    give(monkeypatch, internals)
    monkeypatch.setattr(internals, "get_memory", SimpleNamespace)
    assert "does not say whether it runs with unified memory" in (internals.mode_in_the_way() or "")


def test_a_server_without_such_flags_can_go_layer_by_layer(tmp_path):
    """SGLang's own settings, as a prefill server on a CPU has them."""
    from cpu_serving.model import make_model
    from test_registry import PPGroup, sglang_rank

    from sglang_mooncake.sglang.layerwise.internals import MODES, mode_in_the_way

    model = make_model("llama", tmp_path)
    with sglang_rank(model, "prefill", 8998, 0, PPGroup()):
        assert mode_in_the_way() is None
    with sglang_rank(model, "prefill", 8998, 0, PPGroup(), pp_size=2):
        assert "pipeline stages" in (mode_in_the_way() or "")
    assert len(MODES) == len(FLAGS)
