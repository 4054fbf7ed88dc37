# SPDX-License-Identifier: Apache-2.0
"""Requests with adapters: the names of their pages have the adapter's contents, and can be read in
one way."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]


def test_no_two_pairs_of_key_and_adapter_have_one_name() -> None:
    from sglang_mooncake.sglang.store.adapters import extra_key_of

    contents = {"a": "1", "ab": "1"}
    users: list[str | None] = [None, "a", "b", "ab", "k", "adapter a 1 ", "adapter a 1 k"]
    users += [f"plain {one}" for one in users if one]
    found = {
        extra_key_of(user, adapter, contents): (user, adapter)
        for user, adapter in itertools.product(users, (None, "a", "ab", "unknown"))
    }
    assert len(found) == 4 * len(users)
    assert extra_key_of("k", None, contents) == "k", "requests without an adapter keep their names"
    assert extra_key_of(None, None, contents) is None
    assert extra_key_of("", "a", contents) == extra_key_of(None, "a", contents), "as in SGLang"


def write(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    raw = len(header).to_bytes(8, "little") + header + text.encode()
    (folder / "adapter_model.safetensors").write_bytes(raw)
    (folder / "adapter_config.json").write_text('{"r": 1}')
    return str(folder)


def test_an_adapter_that_was_trained_again_in_place_has_other_contents(tmp_path: Path) -> None:
    from sglang_mooncake.sglang.store.adapters import contents_of

    path = write(tmp_path / "a", "x")
    adapters = [SimpleNamespace(lora_id="1", lora_path=path)]
    first = contents_of(adapters)
    assert contents_of(adapters) == first
    write(tmp_path / "a", "y")
    assert contents_of(adapters) != first


def test_an_adapter_that_cannot_be_told_from_others_is_shared_with_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from sglang_mooncake.sglang.store.adapters import contents_of

    adapters = [SimpleNamespace(lora_id="1", lora_path=str(tmp_path))]
    assert contents_of(adapters) != contents_of(adapters)
    assert "its pages are not shared" in caplog.text


def test_requests_of_a_server_get_such_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.utils import storage_namespace_seed
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_mooncake.sglang.store.adapters import name_adapters

    original = Req.__init__
    monkeypatch.setattr(Req, "__init__", original)  # Is as before after the test.
    adapter = SimpleNamespace(lora_id="1f", lora_path=write(tmp_path / "a", "x"))

    def key(**given: Any) -> str | None:
        sampling = SamplingParams(max_new_tokens=1)
        return Req("r", "", [1], sampling, **given).extra_key

    assert key(extra_key="k", lora_id="1f") == key(extra_key="k1f"), "SGLang's own keys"
    name_adapters.__wrapped__(lambda: [adapter])
    first = key(extra_key="k", lora_id="1f")
    assert first != key(extra_key="k1f") == "k1f"
    assert first != key(extra_key=first)
    assert key(extra_key="k") == "k"
    assert key() is None
    write(tmp_path / "a", "y")
    monkeypatch.setattr(Req, "__init__", original)
    name_adapters.__wrapped__(lambda: [adapter])
    assert key(extra_key="k", lora_id="1f") != first
    assert storage_namespace_seed(first, None) != storage_namespace_seed("k1f", None)
