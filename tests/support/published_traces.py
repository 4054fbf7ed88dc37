# SPDX-License-Identifier: Apache-2.0
"""The published traces (those of the FAST'25 paper on Mooncake), as this repository keeps them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np

DATA = Path(__file__).parents[1] / "kvstore/data"
NAMES = ("conversation", "synthetic")


def lines(name: str) -> str:
    """A trace as it is published. ``name``: one of ``NAMES``."""
    raw = np.frombuffer(lzma.decompress((DATA / f"{name}.xz").read_bytes()), "<i4")
    requests, blocks = raw[:2].tolist()
    counts, steps, times, inputs, outputs = np.split(
        raw[2:], np.cumsum([requests, blocks, requests, requests])
    )
    ends = np.cumsum(counts)
    ids = np.cumsum(steps.astype(np.int64))
    arrivals = np.cumsum(times)
    return "".join(
        json.dumps(
            {
                "timestamp": int(arrivals[i]),
                "input_length": int(inputs[i]),
                "output_length": int(outputs[i]),
                "hash_ids": ids[ends[i] - counts[i] : ends[i]].tolist(),
            }
        )
        + "\n"
        for i in range(requests)
    )
