# SPDX-License-Identifier: Apache-2.0
"""What tests/conftest.py does while tests are read."""

from __future__ import annotations

import gc


def test_what_was_read_for_the_tests_is_left_out_of_garbage_collections() -> None:
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
