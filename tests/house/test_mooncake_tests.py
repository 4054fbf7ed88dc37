# SPDX-License-Identifier: Apache-2.0
"""scripts/mooncake_tests.py runs tests that it is shown over te, and counts them rightly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "mooncake_tests.py"
FILE = "transfer_engine_initiator_test.py"
#: As Mooncake's: reads its settings from the environment, and copies to the first memory there is.
COPIES = """
import os
import unittest
from mooncake.engine import TransferEngine


class TestCopies(unittest.TestCase):
    def test_there_and_back(self):
        engine, target = TransferEngine(), os.environ["TARGET_SERVER_NAME"]
        place, way = os.environ["MC_METADATA_SERVER"], os.environ["PROTOCOL"]
        name = os.environ["INITIATOR_SERVER_NAME"]
        self.assertEqual(engine.initialize(name, place, way, ""), 0)
        here = engine.allocate_managed_buffer(1 << 20)
        there = engine.get_first_buffer_address(target)
        for i in range(int(os.environ["CIRCLE"])):
            data = f"round {i}".encode()
            self.assertEqual(engine.write_bytes_to_buffer(here, data, len(data)), 0)
            self.assertEqual(engine.transfer_sync_write(target, here, there, len(data)), 0)
            self.assertEqual(engine.transfer_sync_read(target, here + 100, there, len(data)), 0)
            self.assertEqual(engine.read_bytes_from_buffer(here + 100, len(data)), data)
"""
FAILS = """
import unittest


class TestNothing(unittest.TestCase):
    def test_good(self):
        pass

    def test_bad(self):
        self.fail("said by the test")

    @unittest.skip("not here")
    def test_skipped(self):
        pass
"""


def call(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.slow
def test_tests_run_over_each_transport(tmp_path: Path) -> None:
    folder = tmp_path / "mooncake-wheel/tests"
    folder.mkdir(parents=True)
    (folder / FILE).write_text(COPIES)
    done = call(tmp_path, "--rounds", 3)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"samehost: 1 of 1 tests of {FILE} passed",
        f"tcp: 1 of 1 tests of {FILE} passed",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "counted", "says"),
    [
        (FAILS, "1 of 3", "said by the test"),
        ("", "0 of 0", "Ran 0 tests"),
    ],
)
def test_a_run_without_success_is_none(tmp_path: Path, source, counted, says) -> None:
    (tmp_path / FILE).write_text(source)
    done = call(tmp_path, "--transports", "tcp")
    assert done.returncode == 1
    assert done.stdout == f"tcp: {counted} tests of {FILE} passed\n"
    assert says in done.stderr


@pytest.mark.slow
def test_tests_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("raise RuntimeError('said by the file')")
    done = call(tmp_path, "--transports", "tcp")
    assert done.returncode == 1
    assert "said by the file" in done.stderr
    assert done.stderr.endswith("mooncake_tests: a process ended; it has said why above\n")


@pytest.mark.slow
def test_a_folder_without_the_file_is_told(tmp_path: Path) -> None:
    done = call(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"mooncake_tests: {tmp_path} has no {FILE}\n"
