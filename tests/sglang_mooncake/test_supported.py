# SPDX-License-Identifier: Apache-2.0
"""What a server is refused for when it starts: one sentence that names the flag."""

from __future__ import annotations

import pytest

from sglang_mooncake.sglang.supported import Modes, refusal

REFUSED = [
    (
        Modes("decode", dcp_size=2, states=("dsa",)),
        "--dcp-size above 1 with a model that keeps dsa",
    ),
    (Modes("prefill", kv_cache_sharding=True, states=("dsa", "swa")), "keeps swa state"),
    (Modes("prefill", cp_tp_group_sharing=True, states=("swa",)), "--enable-prefill-cp"),
    (Modes("prefill", cp_tp_group_sharing=True, has_draft_heads=True), "a draft model"),
    (Modes("prefill", staging_buffer=True), "SGLANG_DISAGG_STAGING_BUFFER"),
    (Modes("decode", "prefill_complete", states=("dsa", "swa")), "keeps swa state"),
]
SERVED = [
    Modes("prefill"),
    Modes("decode", dcp_size=8, states=("mamba",)),
    Modes("prefill", kv_cache_sharding=True, states=("dsa",)),
    Modes("prefill", cp_tp_group_sharing=True, states=("mamba", "qsa_pending", "qsa_compressed")),
    Modes("decode", has_draft_heads=True),
    Modes("decode", "prefill_complete", states=("dsa",)),
    Modes("decode", states=("mamba", "swa")),
]


@pytest.mark.parametrize(("modes", "says"), REFUSED)
def test_what_cannot_work_is_refused_with_its_flag(modes, says):
    sentence = refusal(modes)
    assert sentence is not None
    assert says in sentence
    assert "start" in sentence


@pytest.mark.parametrize("modes", SERVED)
def test_everything_else_is_served(modes):
    assert refusal(modes) is None
