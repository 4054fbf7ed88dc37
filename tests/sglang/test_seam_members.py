# SPDX-License-Identifier: Apache-2.0
"""SGLang against our objects: every member that its schedulers read is there.
`scripts/sglang-releases` has it for any release."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.sglang,
    # SGLang's own imports warn on a machine without a GPU; they are not ours to mend.
    pytest.mark.filterwarnings("ignore"),
]

#: The files of SGLang that hold our objects (`role_switch.py` since 0.5.21), and the names by which
#: they hold them.
FILES = [
    "disaggregation/prefill.py",
    "disaggregation/decode.py",
    "disaggregation/decode_hicache_mixin.py",
    "disaggregation/role_switch.py",
    "disaggregation/utils.py",
    "managers/scheduler.py",
    "managers/scheduler_pp_mixin.py",
]
NAMES = {
    "manager": {"kv_manager", "kv_mgr", "km"},
    "sender": {"disagg_kv_sender", "sender"},
    "receiver": {"kv_receiver"},
    "prefill_info": {"prefill_info"},
}


def _holder(node: ast.expr) -> str | None:
    """The last name of `a.b.kv_manager`, which says what kind of object it is."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def _members_read(tree: ast.AST) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {kind: set() for kind in NAMES}

    def note(holder: ast.expr, member: str) -> None:
        for kind, names in NAMES.items():
            if _holder(holder) in names:
                found[kind].add(member)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            note(node.value, node.attr)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr")
            and isinstance(node.args[1], ast.Constant)
        ):
            note(node.args[0], str(node.args[1].value))
    return found


@pytest.fixture(scope="module")
def members(srt: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {kind: set() for kind in NAMES}
    for path in filter(Path.exists, (srt / name for name in FILES)):
        for kind, read in _members_read(ast.parse(path.read_text())).items():
            found[kind] |= read
    return found


def _has(cls: type, member: str) -> bool:
    """A class attribute, or one that its constructor sets."""
    if hasattr(cls, member):
        return True
    sources = "".join(inspect.getsource(base) for base in cls.__mro__ if base is not object)
    return (
        f"self.{member} =" in sources
        or f"self.{member}:" in sources
        or (f"self.{member}, " in sources or f", self.{member} =" in sources)
    )


@pytest.mark.parametrize("kind", ["manager", "sender", "receiver"])
def test_our_objects_have_every_member_that_sglang_reads(members, kind):
    from sglang_mooncake.sglang.plugin import serving_classes
    from sglang_mooncake.sglang.seam import ABSENT_MEMBERS

    assert len(members[kind]) > 5, "the scan no longer finds SGLang's reads"
    cls = serving_classes()[kind]
    missing = {m for m in members[kind] if not _has(cls, m)} - ABSENT_MEMBERS.keys()
    assert not missing, f"SGLang reads of our {kind}: {sorted(missing)}"


def test_prefill_info_has_every_field_that_sglang_reads(members):
    from sglang_mooncake.instances import PrefillInfo

    assert members["prefill_info"]
    assert members["prefill_info"] <= set(PrefillInfo.__dataclass_fields__)


def test_what_we_leave_out_is_still_what_sglang_probes_for(members):
    from sglang_mooncake.sglang.seam import ABSENT_MEMBERS

    assert set(ABSENT_MEMBERS) <= set().union(*members.values())


def test_the_scan_would_find_a_new_member():
    tree = ast.parse("x = self.kv_manager.brand_new\nhasattr(req.disagg_kv_sender, 'also_new')")
    found = _members_read(tree)
    assert found["manager"] == {"brand_new"}
    assert found["sender"] == {"also_new"}


def test_constructors_take_what_sglang_passes():
    from sglang.srt.disaggregation.base import conn

    from sglang_mooncake.sglang.plugin import serving_classes

    ours = serving_classes()
    for kind, base in {
        "manager": conn.BaseKVManager,
        "sender": conn.BaseKVSender,
        "receiver": conn.BaseKVReceiver,
        "bootstrap_server": conn.BaseKVBootstrapServer,
    }.items():
        for name, method in inspect.getmembers(base, inspect.isfunction):
            mine = getattr(ours[kind], name, None)
            if name == "poll" and kind == "bootstrap_server":
                continue
            assert mine is not None, f"{kind}.{name}"
            missing = inspect.signature(method).parameters.keys() - (
                inspect.signature(mine).parameters.keys()
            )
            assert not missing, f"{kind}.{name} lacks {missing}"
