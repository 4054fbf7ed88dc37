# SPDX-License-Identifier: Apache-2.0
"""What names storage goes to NVIDIA's package, where it is installed; memory goes to te."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nixl_agents import agent, blocks, ended, registered

from sglang_mooncake.faces.nixl import storage
from sglang_mooncake.faces.nixl.api import nixl_agent_config
from sglang_mooncake.faces.nixl.descriptors import RegDList, XferDList
from sglang_mooncake.faces.nixl.names import (
    Backend,
    NotFound,
    NotSupported,
    Operation,
    Segment,
    Status,
)

KIB = 1024


class nixlNotFoundError(Exception):  # noqa: N801 - of the name is what is looked at
    """Theirs."""


class Theirs:
    """NVIDIA's agent, as far as it is asked here: notes what it is asked."""

    def __init__(self, name: str, config: object) -> None:
        self.calls: list[tuple[Any, ...]] = []
        made.append(self)

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((method, *arguments))
            return ANSWERS.get(method, 70 + len(self.calls))

        return call

    def deregisterMem(self, descs: Any, backends: Any) -> int:  # noqa: N802
        raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")


made: list[Theirs] = []
ANSWERS = {
    "getBackendParams": ({}, ["FILE_SEG"]),
    "queryMem": [{"size": "1"}, None],
    "registerMem": 0,
    "postXferReq": Status.NIXL_IN_PROG,
    "getXferStatus": Status.NIXL_SUCCESS,
}
BINDINGS = SimpleNamespace(
    nixlAgent=Theirs,
    nixlAgentConfig=lambda: None,
    nixlRegDList=lambda segment, rows: ("reg", segment, rows),
    nixlXferDList=lambda segment, rows: ("xfer", segment, rows),
    **{one.name: f"their {one.name}" for one in (*Segment, *Operation)},
)


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> list[Theirs]:
    made.clear()
    monkeypatch.setattr(storage, "installed", lambda: (Path("there"), ("OBJ", "POSIX")))
    monkeypatch.setattr(storage, "_bindings", lambda path: BINDINGS)
    return made


def test_files_are_theirs_and_memory_is_known_to_both(theirs: list[Theirs]) -> None:
    one = agent("a")
    assert one.get_plugin_list() == ["UCX", "OBJ", "POSIX"]
    assert not theirs  # Nothing of theirs is loaded before it is asked for.
    one.create_backend("POSIX", {"use_direct": "1"})
    (other,) = theirs
    assert other.calls[0] == ("createBackend", "POSIX", {"use_direct": "1"})
    assert one.get_backend_mem_types("POSIX") == ["FILE_SEG"]
    memory = registered(one, 2 * KIB, seed=1)
    assert other.calls[-1] == (
        "registerMem",
        ("reg", "their DRAM_SEG", [(memory.ctypes.data, 2 * KIB, 0, "")]),
        [],
    )
    file = one.register_memory([(0, KIB, 7, "path")], "FILE", ["POSIX"])
    assert one.query_memory(file, "POSIX") == [{"size": "1"}, None]
    host = one.get_xfer_descs(blocks(memory, KIB)[:1], "DRAM")
    handle = one.initialize_xfer("WRITE", host, file.trim(), "a", b"", ["POSIX"])
    assert other.calls[-1][:4] == (
        "createXferReq",
        "their NIXL_WRITE",
        ("xfer", "their DRAM_SEG", [(memory.ctypes.data, KIB, 0)]),
        ("xfer", "their FILE_SEG", [(0, KIB, 7)]),
    )
    assert (one.transfer(handle), one.check_xfer_state(handle)) == ("PROC", "DONE")
    one.release_xfer_handle(handle)
    assert other.calls[-1][0] == "releaseXferReq"
    # And te's transfers go on beside them.
    there = one.get_xfer_descs(blocks(memory, KIB)[1:], "DRAM")
    handle = one.initialize_xfer("WRITE", host, there, "a")
    one.transfer(handle)
    assert ended(one, handle) == "DONE"
    assert (memory[:KIB] == memory[KIB:]).all()
    with pytest.raises(NotFound, match="NVIDIA's NIXL"):
        one.deregister_memory(file)


def test_prepared_memory_is_prepared_for_them_once_it_is_wanted(theirs: list[Theirs]) -> None:
    one = agent("a")
    one.create_backend("POSIX")
    memory = registered(one, 2 * KIB)
    local = one.prep_xfer_dlist("", blocks(memory, KIB), "DRAM")
    prepared = [call for call in theirs[0].calls if call[0] == "prepXferDlist"]
    assert not prepared
    remote = one.prep_xfer_dlist("a", XferDList(Segment.FILE_SEG, [(0, KIB, 7)] * 2))
    for _ in range(2):
        handle = one.make_prepped_xfer("READ", local, [1], remote, [0])
    prepared = [call[1] for call in theirs[0].calls if call[0] == "prepXferDlist"]
    assert prepared == ["a", ""]
    assert one.transfer(handle) == "PROC"
    del handle
    assert theirs[0].calls[-1][0] == "releaseXferReq"
    # And it stays prepared for te.
    memory[:KIB] = 7
    there = one.prep_xfer_dlist("a", blocks(memory, KIB), "DRAM")
    handle = one.make_prepped_xfer("WRITE", local, [0], there, [1])
    one.transfer(handle)
    assert ended(one, handle) == "DONE"
    assert (memory == 7).all()


def test_memory_is_known_to_both_or_to_neither(theirs: list[Theirs], monkeypatch) -> None:
    one = agent("a")
    one.create_backend("POSIX")
    memory = np.zeros(KIB, np.uint8)
    descs = one.get_reg_descs([(memory.ctypes.data, KIB, 0, "")], "DRAM")

    def refuse(*arguments: object) -> None:
        raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")

    with monkeypatch.context() as patch:
        patch.setattr(Theirs, "registerMem", refuse, raising=False)
        with pytest.raises(NotFound, match="NVIDIA's NIXL"):
            one.register_memory(descs)
        patch.setattr(Theirs, "registerMem", len, raising=False)
        with pytest.raises(TypeError):  # No error of NIXL's stays what it is.
            one.register_memory(descs)
    assert one.agent._impl.memory.ranges()[1] == []
    one.register_memory(descs)

    def in_use(*arguments: object) -> None:
        raise Backend("in use")

    monkeypatch.setattr(one.agent._impl.memory, "deregister", in_use)
    with pytest.raises(Backend, match="in use"):  # And not what they would say.
        one.deregister_memory(descs)


def test_an_agent_may_have_storage_alone(theirs: list[Theirs]) -> None:
    one = agent("a", nixl_agent_config(backends=["POSIX"]))
    registered(one, KIB)
    kept = one.prep_xfer_dlist("", [(1, 2, 0)], "DRAM")
    assert kept
    assert [call[0] for call in theirs[0].calls[-2:]] == ["registerMem", "prepXferDlist"]


def test_without_their_package_there_is_no_storage(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    storage.installed.cache_clear()
    assert storage.installed() is None
    one = agent("a")
    assert one.get_plugin_list() == ["UCX"]
    with pytest.raises(NotFound):
        one.create_backend("POSIX")
    with pytest.raises(NotSupported):
        one.query_memory(RegDList(Segment.DRAM_SEG), "UCX")
    storage.installed.cache_clear()


def test_their_package_is_found_without_loading_it(tmp_path: Path, monkeypatch) -> None:
    package, plugins = tmp_path / "nixl_cu12", tmp_path / ".nixl_cu12.mesonpy.libs" / "plugins"
    for folder in (package, plugins):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError\n")
    (package / f"_bindings{EXTENSION_SUFFIXES[0]}").touch()
    for name in ("POSIX", "UCX", "OBJ"):
        (plugins / f"libplugin_{name}.so").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    storage.installed.cache_clear()
    assert storage.installed() == (
        package / f"_bindings{EXTENSION_SUFFIXES[0]}",
        ("OBJ", "POSIX"),
    )
    storage.installed.cache_clear()


ROOT = Path(__file__).resolve().parents[3]
NVIDIAS = ROOT / "build/peers/nixl"
WRITES_A_FILE = """
import os, sys
import numpy as np
from sglang_mooncake.sglang.drop_in import install
install()
from nixl._api import nixl_agent, nixl_agent_config

NBYTES = 1 << 20
one = nixl_agent("a", nixl_agent_config(backends=["UCX", "POSIX"]))
memory = np.zeros(2 * NBYTES, np.uint8)
memory[:NBYTES] = np.arange(NBYTES).astype(np.uint8)
there = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
one.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
file = one.register_memory([(0, NBYTES, there, "")], "FILE", ["POSIX"])

def moves(operation, at):
    here = one.get_xfer_descs([(memory.ctypes.data + at, NBYTES, 0)], "DRAM")
    handle = one.initialize_xfer(operation, here, file.trim(), "a", b"", ["POSIX"])
    state = one.transfer(handle)
    while state == "PROC":
        state = one.check_xfer_state(handle)
    assert state == "DONE", state
    one.release_xfer_handle(handle)

moves("WRITE", 0)
memory[:NBYTES] = 0
moves("READ", NBYTES)
assert memory[NBYTES:].tobytes() == bytes(range(256)) * 4096
one.deregister_memory(file)
"""


@pytest.mark.slow
def test_nvidias_own_package_writes_and_reads_a_file(tmp_path: Path) -> None:
    assert NVIDIAS.is_dir(), "scripts/setup peer nixl installs it, as scripts/test does"
    path = tmp_path / "file"
    done = subprocess.run(
        [sys.executable, "-c", WRITES_A_FILE, str(path)],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(NVIDIAS)]),
            "SGLANG_MOONCAKE_HOST": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=100.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_bytes() == bytes(range(256)) * 4096
