# SPDX-License-Identifier: Apache-2.0
"""Which prefixes can be loaded, beside the definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_mooncake.sglang.store.prefixes import all_pages, run, trailing_pages

PAGES = st.lists(st.booleans(), max_size=12)


@given(PAGES)
def test_every_page_is_needed(found: list[bool]) -> None:
    pages = np.array(found, bool)
    good = [n for n in range(1, len(found) + 1) if all(found[:n])]
    assert list(all_pages(pages)) == good
    assert run(pages) == len(good)


@given(PAGES, st.integers(1, 14))
def test_the_last_pages_are_needed(found: list[bool], window: int) -> None:
    good = [n for n in range(1, len(found) + 1) if all(found[max(0, n - window) : n])]
    assert trailing_pages(np.array(found, bool), window) == good
