# SPDX-License-Identifier: Apache-2.0
"""What a server is refused for when it starts: one sentence that names the flag."""

from __future__ import annotations

import pytest

from sglang_mooncake.supported import Modes, refusal

REFUSED = [
    (Modes("prefill", cp_tp_group_sharing=True), "--enable-prefill-cp"),
    (Modes("decode", dcp_size=2), "--dcp-size above 1"),
    (Modes("prefill", kv_cache_sharding=True), "--enable-kv-cache-sharding"),
    (Modes("decode", hisparse=True, has_draft=True), "--enable-hisparse with a draft model"),
    (Modes("decode", hisparse=True, is_compressed=True), "--enable-hisparse with DeepSeek-V4"),
    (Modes("prefill", staging_buffer=True), "SGLANG_DISAGG_STAGING_BUFFER"),
    (Modes("decode", "prefill_complete", states=("dsa", "swa")), "keeps swa state"),
]
SERVED = [
    Modes("prefill"),
    Modes("decode", hisparse=True),
    Modes("decode", has_draft=True, is_compressed=True),
    Modes("prefill", hisparse=True, has_draft=True),
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
