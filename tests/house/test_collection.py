# SPDX-License-Identifier: Apache-2.0
"""What tests/conftest.py does while tests are read."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings


def test_what_was_read_for_the_tests_is_left_out_of_garbage_collections() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_the_fast_layer_has_half_the_examples(pytestconfig: pytest.Config) -> None:
    is_fast = pytestconfig.option.markexpr == "fast"
    assert settings().max_examples == (50 if is_fast else 100)
