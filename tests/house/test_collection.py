# SPDX-License-Identifier: Apache-2.0
"""What tests/conftest.py does while tests are read."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from testrun.plan import REST

TESTS = Path(__file__).parents[1]


def test_what_was_read_for_the_tests_is_left_out_of_garbage_collections() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_the_fast_layer_has_half_the_examples(pytestconfig: pytest.Config) -> None:
    is_fast = pytestconfig.option.markexpr == "fast"
    assert settings().max_examples == (50 if is_fast else 100)


def conftest_of_all(config: pytest.Config) -> Any:
    """The module tests/conftest.py."""
    path = str(TESTS / "conftest.py")
    plugins = config.pluginmanager.get_plugins()
    (found,) = (one for one in plugins if getattr(one, "__file__", None) == path)
    return found


@pytest.mark.parametrize(
    ("expression", "name", "is_read"),
    [
        ("fast", "te", True),
        ("fast", "serving", False),
        ("rdma", "te", True),
        ("rdma", "te/test_te_notes.py", True),
        ("rdma", "te/test_te_blocks.py", False),
        ("not rdma and not pure", "te/test_te_notes.py", True),
        ("not rdma and not pure", "te/test_te_blocks.py", False),
        (REST[-1], "te/test_te_blocks.py", True),
        (REST[-1], "te/test_te_rings.py", False),
        (REST[-1], "sglang/test_release.py", True),
        ("", "te/test_te_rings.py", True),
    ],
)
def test_what_has_no_test_for_an_expression_is_not_read(
    pytestconfig: pytest.Config, expression: str, name: str, is_read: bool
) -> None:
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    is_left_out = conftest_of_all(pytestconfig).pytest_ignore_collect(TESTS / name, config)
    assert is_left_out is (None if is_read else True)


@pytest.mark.parametrize(("mark", "file"), [("rdma", "blocks"), ("slow", "rings")])
def test_a_test_in_a_file_that_may_not_be_read_for_it_is_refused(
    pytestconfig: pytest.Config, mark: str, file: str
) -> None:
    item = SimpleNamespace(
        path=TESTS / f"te/test_te_{file}.py",
        nodeid="one",
        iter_markers=lambda: [SimpleNamespace(name=mark)],
        get_closest_marker=lambda name: name == mark,
    )
    with pytest.raises(pytest.UsageError, match="one may be left out of a run"):
        conftest_of_all(pytestconfig).pytest_itemcollected(item)
