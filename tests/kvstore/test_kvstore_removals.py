# SPDX-License-Identifier: Apache-2.0
"""What was removed lately."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.rules.removals import Removals

pytestmark = pytest.mark.fast

NAMES = [bytes([key]) * 16 + bytes([of]) * 16 for key in range(4) for of in range(2)]
STEPS = st.lists(st.sampled_from([*NAMES, NAMES[0][16:], NAMES[1][16:]]), max_size=20)


@given(STEPS, st.integers(1, 30), st.integers(0, 21))
def test_no_removal_is_forgotten(steps: list[bytes], names_max: int, since: int) -> None:
    """One a second. With room for all of them, no other one is taken for removed."""
    removals = Removals(names_max)
    for second, one in enumerate(steps):
        removals.add([one], float(second))
    for name in NAMES:
        was_removed = any(one in (name, name[16:]) for one in steps[since:])
        if was_removed or len(set(steps)) <= names_max:
            assert removals.has(name, float(since)) == was_removed
