# SPDX-License-Identifier: Apache-2.0
"""Settings of the store as operators write them: a wrong one is named, and never taken for another
value."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import Config
from kvstore.values import parse_bytes, typed

#: One of each kind that JSON has.
OF_JSON: dict[str, Any] = {
    "true": True, "number": 3, "part": 0.5, "text": "2", "list": [1], "object": {}, "null": None,
}  # fmt: skip
ACCEPTED = {
    "bool": {"true"}, "int": {"number"}, "float": {"number", "part"}, "str": {"text"},
    "Path": {"text"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ACCEPTED)
@pytest.mark.parametrize("given", OF_JSON)
def test_values_of_another_kind_are_refused(kind: str, given: str) -> None:
    value = OF_JSON[given]
    if given in ACCEPTED[kind]:
        assert typed("x", value, kind) == (Path(value) if kind == "Path" else value)
        return
    with pytest.raises(ValueError, match=r"^x=.* must be (a|true or false)"):
        typed("x", value, kind)
    if given == "null":
        assert typed("x", value, f"{kind} | None") is None


def test_every_setting_is_of_a_kind_that_is_checked() -> None:
    for one in dataclasses.fields(Config):
        if one.name not in ("engine", "keys"):
            assert str(one.type).removesuffix(" | None") in ACCEPTED


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"verify": "false"}, "verify='false' must be true or false"),
        ({"copies": "2"}, "copies='2' must be a whole number"),
        ({"copies": True}, "copies=True must be a whole number"),
        ({"free_low": "5%"}, "free_low='5%' must be a number"),
        ({"free_low": float("nan")}, "free_low=nan and free_high=0.1: give two parts"),
        ({"memory": True}, "memory: True is no size: write it like 16GiB"),
        ({"memory": 1.5}, "memory: 1.5 is no size"),
        ({"memory": [1]}, r"memory: \[1\] is no size"),
        ({"memory": "16 gigs"}, "memory: '16 gigs' is no size"),
        ({"directory": 7}, "directory=7 must be a path"),
        ({"secret_file": 7}, "secret_file=7 must be a path"),
        ({"policy": "mru"}, "policy='mru' is none of arc, lru"),
        ({"copys": 2}, "no setting 'copys'; did you mean 'copies'?"),
        ({"engine": {}}, "no setting 'engine'"),
        ({"layers_per_reed": 2}, "did you mean 'layers_per_read'?"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        Config.of(given, others=("layers_per_read",))


@pytest.mark.parametrize("one", dataclasses.fields(Config), ids=lambda one: one.name)
def test_a_value_of_another_kind_is_named_where_python_makes_the_settings(
    one: dataclasses.Field[Any],
) -> None:
    if one.name in ("engine", "keys"):
        return
    with pytest.raises(ValueError, match=rf"^{one.name}=.* must be a?"):
        Config(**{one.name: object()})
    assert Config(directory="/run/x").directory == Path("/run/x")  # type: ignore[arg-type]
    assert Config(directory=Path("x")).directory == Path.cwd() / "x", "wherever it is used"


def test_right_settings_are_taken() -> None:
    given = {"memory": "1.5MiB", "directory": "/run/x", "copies": 2, "free_high": 0, "free_low": 0}
    made = Config.of(given)
    assert made.memory == 1_572_864
    assert made.directory == Path("/run/x")
    assert (made.copies, made.free_low) == (2, 0)


@given(
    st.integers(0, 1 << 50),
    st.sampled_from([("", 1), ("B", 1), ("KiB", 1 << 10), ("gib", 1 << 30)]),
)
def test_sizes(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(number) == number
    if number < 1 << 40:
        assert parse_bytes(f" {number} {unit[0]}") == number * unit[1]
