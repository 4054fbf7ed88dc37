# SPDX-License-Identifier: Apache-2.0
"""Weights that are updated in place: every update is seen, and pages of several weights are never
told to be of one."""

from __future__ import annotations

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


def make(versions: list[str] | None = None) -> Any:
    from sglang_mooncake.sglang.store.updates import Updates

    said = versions or ["1"]
    return Updates(lambda: said[-1])


def test_pages_that_were_computed_before_an_update_are_nobodys_until_a_flush() -> None:
    one = make()
    first = one.now
    assert first == "version 1"
    one.computed()
    one.changed("a")
    assert one.now is None
    one.computed()
    one.changed("b")
    assert one.now is None
    one.flushed()
    assert one.now == "version 1 b"


def test_an_update_of_an_empty_cache_needs_no_flush() -> None:
    one = make()
    one.changed("a")
    assert one.now == "version 1 a"
    one.computed()
    one.flushed()
    one.changed("b")
    assert one.now == "version 1 b"


def test_an_update_that_nobody_names_is_like_no_other() -> None:
    found = set()
    for one in (make(), make()):
        for _ in range(2):
            one.changed()
            found.add(one.now)
    assert len(found) == 4, "two servers that say the same of their weights share nothing"


def test_a_new_version_says_that_somebody_else_has_changed_the_weights() -> None:
    versions = ["1"]
    one, other = make(versions), make(versions)
    one.computed()
    assert one.now == "version 1"
    versions.append("2")
    assert one.now is None
    one.flushed()
    assert one.now != other.now
    assert str(one.now).startswith("version 2 ")


def test_the_version_of_an_update_that_was_seen_is_no_other_update() -> None:
    versions = ["1"]
    one = make(versions)
    one.computed()
    one.changed("a")
    versions.append("2")
    assert one.now is None
    one.flushed()
    assert one.now == "version 2 a"


def write(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    raw = len(header).to_bytes(8, "little") + header + text.encode()
    (folder / "model.safetensors").write_bytes(raw)


def read(one: Any, folder: Path, load_format: str = "auto") -> Any:
    one.read(str(folder), load_format, one.changed())
    return one.now


def test_weights_that_were_read_from_equal_files_are_equal(tmp_path: Path) -> None:
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        write(tmp_path / name, text)
    one, two, three = make(), make(), make()
    first = read(one, tmp_path / "a")
    assert first == read(two, tmp_path / "b") != read(three, tmp_path / "c")
    assert read(three, tmp_path / "a") != first, "what a directory lacks is of the weights before"


@pytest.mark.parametrize(("folder", "load_format"), [("none", "auto"), ("a", "dummy")])
def test_weights_that_were_not_read_from_files_are_like_no_others(
    tmp_path: Path, folder: str, load_format: str
) -> None:
    write(tmp_path / "a", "x")
    first = read(make(), tmp_path / folder, load_format)
    assert first != read(make(), tmp_path / folder, load_format)


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hooks, on classes of the same shape as SGLang's; what is below them does nothing."""
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    from sglang_mooncake.sglang.store import updates as module

    def nothing(*_: Any, **__: Any) -> tuple[bool, str]:
        return True, ""

    for owner, name in (
        (WeightUpdater, module.FROM_DISK),
        *((WeightUpdater, one) for one in module.UPDATES),
        (ModelRunner, "check_weights"),
        (ModelRunner, "forward"),
        (UnifiedRadixCache, "reset"),
    ):
        assert callable(getattr(owner, name)), "what SGLang calls it"
        monkeypatch.setattr(owner, name, nothing)
    monkeypatch.setattr(module, "get_serving", lambda: SimpleNamespace(weight_version="1"))
    monkeypatch.setattr(module, "updates", module.updates.__wrapped__)
    return SimpleNamespace(
        now=module.updates(),
        updater=WeightUpdater,
        runner=ModelRunner,
        tree=UnifiedRadixCache,
        names=module.UPDATES,
    )


def test_each_way_to_update_weights_is_seen(hooked: Any, tmp_path: Path) -> None:
    seen = [hooked.now.now]
    for name in hooked.names:
        hooked.runner.forward("runner")
        assert hooked.now.now == seen[-1]
        getattr(hooked.updater, name)("updater")
        assert hooked.now.now is None
        hooked.tree.reset("tree")
        seen.append(hooked.now.now)
    hooked.runner.check_weights("runner", "checksum", role="target")
    assert hooked.now.now == seen[-1]
    hooked.runner.check_weights("runner", "reset_tensors", role="target")
    seen.append(hooked.now.now)
    hooked.updater.update_weights_from_disk("updater", str(tmp_path), "auto")
    seen.append(hooked.now.now)
    assert None not in seen
    assert len(set(seen)) == len(seen)


def test_weights_from_a_disk_are_known_by_their_files(hooked: Any, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write(folder, "x")
    update = hooked.updater.update_weights_from_disk
    update("updater", str(folder), "auto", recapture_cuda_graph=False)
    first = hooked.now.now
    assert first == read(make(), folder)
    update("updater", str(folder), "auto", weight_name_filter=lambda _: True)
    assert hooked.now.now != read(make(), folder)
