# SPDX-License-Identifier: Apache-2.0
"""Each mode that some release of SGLang lacks, asked for in the release that is there: it is
refused with the first release that has it, by SGLang, which does not know its flag, or by us.
`scripts/sglang-releases` has these tests for any release."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cpu_serving.model import make_model
from cpu_serving.servers import MTP_FLAGS

from sglang_mooncake.sglang.releases import Mode, lacking

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

#: For the modes that have some.
FLAGS: dict[Mode, list[str]] = {
    Mode.DRAFTS: [str(word) for flag in MTP_FLAGS.items() for word in flag],
    Mode.DCP: ["--tp-size", "2", "--dcp-size", "2"],
    Mode.SHARDING: ["--enable-kv-cache-sharding"],
    Mode.HISPARSE: ["--enable-hisparse"],
}
#: SGLang itself refuses their flags on a CPU: what it makes of them is said of its ranks alone.
NOT_ON_A_CPU = (Mode.SHARDING,)
#: What a rank knows of itself where that is no flag, or where SGLang knows it with its ranks alone.
PARALLEL: dict[Mode, dict[str, Any]] = {
    Mode.DCP: {"attn_dcp_size": 2},
    Mode.SHARDING: {"enable_kv_cache_sharding": True},
    Mode.GROUP_SHARING: {"enable_cp_tp_group_sharing": True},
}


@pytest.fixture
def published() -> Iterator[Any]:
    """Publishes a prefill server's flags for a mode, as its scheduler does; False if SGLang does
    not know them."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    model = make_model("deepseek-v3")
    base = ["--model-path", str(model), "--device", "cpu", "--disaggregation-mode", "prefill"]

    def publish(mode: Mode | None = None) -> bool:
        flags = FLAGS.get(mode, []) if mode else []
        known, unknown = parser.parse_known_args([*base, *flags])
        if unknown:
            return False
        if mode in NOT_ON_A_CPU:
            known = parser.parse_args(base)
        runtime_context.publish(ServerArgs.from_cli_args(known), role="scheduler")
        return True

    yield publish
    runtime_context.reset_context()


def said_of(kv_args: Any) -> str:
    """Why a prefill server is refused; empty if it is not."""
    from sglang_mooncake.sglang import seam

    try:
        seam.check_supported(kv_args, seam.DisaggregationMode.PREFILL, has_draft_heads=False)
    except seam.UnsupportedServer as refused:
        return str(refused)
    return ""


def expected_of(mode: Mode) -> str | None:
    from sglang.version import __version__

    return lacking(mode, __version__)


class _Telling:
    """A rank's parallel context, with some facts said."""

    def __init__(self, parallel: Any, facts: dict[str, Any]) -> None:
        self._parallel, self._facts = parallel, facts

    def __getattr__(self, name: str) -> Any:
        facts = self.__dict__["_facts"]
        return facts[name] if name in facts else getattr(self._parallel, name)


@pytest.mark.parametrize("mode", [*FLAGS, Mode.GROUP_SHARING], ids=lambda mode: mode.name)
def test_a_server_is_refused_by_its_flags(mode: Mode, published: Any, monkeypatch: Any) -> None:
    from sglang_mooncake.sglang import seam

    expected = expected_of(mode)
    if not published(mode):
        assert expected is not None, f"SGLang does not know {FLAGS[mode]}"
        return
    facts = PARALLEL.get(mode, {})
    parallel = seam.get_parallel()
    monkeypatch.setattr(seam, "get_parallel", lambda: _Telling(parallel, facts))
    plain = SimpleNamespace(state_types=[], mla_compression_ratios=None)
    assert said_of(plain) == (expected or "")


def test_deepseek_v4_is_refused_by_its_caches(published: Any) -> None:
    published()
    kv_args = SimpleNamespace(state_types=[], mla_compression_ratios=[1, 4, 128])
    assert said_of(kv_args) == (expected_of(Mode.DEEPSEEK_V4) or "")


def test_the_linker_is_refused_as_it_is_imported() -> None:
    name = "sglang_mooncake.sglang.store.linker"
    expected = expected_of(Mode.LINKER)
    if expected is None:
        assert importlib.import_module(name).StoreLinker
        return
    with pytest.raises(ImportError) as refused:
        importlib.import_module(name)
    assert str(refused.value) == expected


class Figures:
    """Keeps why layers do not go early."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def fell_back(self, reason: str) -> None:
        self.reasons.append(reason)


def test_layer_by_layer_is_off_where_a_release_counts_otherwise(published: Any) -> None:
    from sglang_mooncake.sglang.layerwise.hooks import Layerwise

    published()
    figures, sink = Figures(), SimpleNamespace(by_layers=False)
    made = Layerwise(sink, figures, 64, [0, 1], by_position=False, has_streams=False)
    assert not made.install()
    # Where the release has it, the next reason is that of this sink.
    other = "the caches of this rank are not told apart by layers"
    assert figures.reasons == [expected_of(Mode.LAYERWISE) or other]
