# SPDX-License-Identifier: Apache-2.0
"""What an operator says of the store in SGLang's extra config."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_mooncake.sglang.store.options import LAYERS_PER_READ, LOAD_TIMEOUT_S, Options


def test_what_is_not_said_has_its_default():
    made = Options.of({"memory": "1GiB"})
    assert made.store.memory == 1 << 30
    assert (made.weights, made.layers_per_read, made.load_timeout_s) == (
        None, LAYERS_PER_READ, LOAD_TIMEOUT_S,
    )  # fmt: skip


def test_what_is_said_counts():
    made = Options.of({"weights": "v2", "layers_per_read": 8, "load_timeout_s": 3, "copies": 2})
    assert (made.weights, made.layers_per_read, made.load_timeout_s) == ("v2", 8, 3)
    assert made.store.copies == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"layers_per_read": 0}, "layers_per_read=0 and load_timeout_s=10.0 must be positive"),
        ({"load_timeout_s": float("inf")}, "load_timeout_s=inf must be positive"),
        ({"layers_per_read": "4"}, "layers_per_read='4' must be a whole number"),
        ({"load_timeout_s": "10 s"}, "load_timeout_s='10 s' must be a number"),
        ({"weights": 2}, "weights=2 must be a text"),
        ({"layer_per_read": 4}, "no setting 'layer_per_read'; did you mean 'layers_per_read'"),
        ({"verify": "no"}, "verify='no' must be true or false"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Options.of(given)
