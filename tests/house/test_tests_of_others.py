# SPDX-License-Identifier: Apache-2.0
"""Scripts that run others' tests over te and the store: they run what they are shown, in the
processes that they promise, and say whether it passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).resolve().parents[2]
IS_NIXL = """
import nixl._bindings as bindings
from nixl._api import nixl_agent


def test_it_is_te():
    agent = nixl_agent("a")
    assert agent.get_agent_metadata().startswith(b"te-nixl")
    assert agent.get_plugin_list()[0] == "UCX"
"""
IS_STORE = """
from mooncake.store import MooncakeDistributedStore


def test_it_is_kvstore():
    assert MooncakeDistributedStore().put("a", b"b") == -600, "Mooncake's ends the process"
"""
BAD = """
def test_bad():
    raise AssertionError("said by the test")
"""
Which: TypeAlias = tuple[str, str, tuple[str, str]]
#: Where each script looks below the folder, and for which files.
NIXLS: Which = ("nixl_tests.py", "test/python", ("test_nixl_api.py", "test_nixl_bindings.py"))
LMCACHES: Which = (
    "lmcache_channel_tests.py",
    "",
    (
        "tests/disagg/test_nixl_channel.py",
        "tests/v1/distributed/transfer_channel/test_nixl_impl.py",
    ),
)
MOONCAKES: Which = (
    "mooncake_store_tests.py",
    "mooncake-wheel/tests",
    ("test_distributed_object_store.py", "test_replicated_distributed_object_store.py"),
)


def call(script: str, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), *map(str, words)],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=280.0,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("which", "sources", "status"),
    [
        (NIXLS, (IS_NIXL, IS_NIXL), 0),
        (NIXLS, (IS_NIXL, BAD), 1),
        (LMCACHES, (IS_NIXL, IS_NIXL), 0),
        (MOONCAKES, (IS_STORE, BAD), 1),
    ],
)
def test_the_tests_run_over_te(
    tmp_path: Path, which: Which, sources: tuple[str, str], status: int
) -> None:
    script, place, files = which
    # A checkout has the package, too, and what all of its tests share needs more than these.
    (tmp_path / "msgspec.py").write_text("raise ImportError('not the installed one')\n")
    (tmp_path / "conftest.py").write_text("raise ImportError('read')\n")
    for file, source in zip(files, sources, strict=True):
        path = tmp_path / place / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for folder in list(Path(file).parents)[:-1]:
            (tmp_path / place / folder / "__init__.py").touch()
    done = call(script, tmp_path)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("said by the test" in done.stdout) == bool(status)


@pytest.mark.parametrize("which", [NIXLS, LMCACHES, MOONCAKES])
def test_a_folder_without_them_is_told(tmp_path: Path, which: Which) -> None:
    script, _place, files = which
    done = call(script, tmp_path)
    assert done.returncode == 2
    assert f"has no {' and '.join(files)}" in done.stderr
