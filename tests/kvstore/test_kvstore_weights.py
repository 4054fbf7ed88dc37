# SPDX-License-Identifier: Apache-2.0
"""Weights are told apart by what is in their files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvstore.weights import identity


def write_model(folder: Path, change: int | None = None) -> Path:
    """A directory with one safetensors file of two tensors; one number of it is changed."""
    folder.mkdir()
    numbers = np.arange(2000, dtype="<f4")
    if change is not None:
        numbers[change] += 1
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]},
            "b": {"dtype": "F32", "shape": [1000], "data_offsets": [4000, 8000]},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + numbers.tobytes()
    )
    (folder / "config.json").write_text('{"hidden_size": 8}')
    return folder


def test_weights_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    first = identity(write_model(tmp_path / "a"))
    assert identity(write_model(tmp_path / "b")) == first, "the name says nothing"
    for i, change in enumerate((0, 999, 1000, 1999)):
        assert identity(write_model(tmp_path / f"c{i}", change)) != first
    other = write_model(tmp_path / "d")
    (other / "config.json").write_text('{"hidden_size": 9}')
    assert identity(other) != first


def test_weights_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no safetensors files"):
        identity(tmp_path)
    for content in (b"", b"\xff" * 100, (5).to_bytes(8, "little") + b"hello"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match=r"model.safetensors is no safetensors file"):
            identity(tmp_path)
