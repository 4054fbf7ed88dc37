# SPDX-License-Identifier: Apache-2.0
"""Small parts: configuration, cards, tags, the landing gate, transfers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te
from te.handshake import PROTOCOL_VERSION, Card, Welcome, decode_body, decode_card, encode

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"transports": ("smoke",)},
            "'smoke' is not available in this build; available: samehost, rdma, tcp$",
        ),
        ({"transports": ("rmda",)}, "samehost, rdma, tcp. Did you mean 'rdma'?"),
        ({"transports": ()}, "at least one"),
        ({"transports": ("tcp", "tcp")}, "each once"),
        ({"status_dir": "text"}, "status_dir='text' must be a pathlib.Path or None"),
        ({"topology": "t.json"}, "topology='t.json' must be a pathlib.Path or None"),
        ({"host": None}, "host=None must be a text"),
        ({"label": 7}, "label=7 must be a text"),
        ({"port": "80"}, "port='80' must be a whole number"),
        ({"rails": 1.0}, "rails=1.0 must be a whole number"),
        ({"rails": True}, "rails=True must be a whole number"),
        ({"spin_s": "1"}, "spin_s='1' must be a number"),
        ({"encrypt": "no"}, "encrypt='no' must be True or False"),
        ({"nics": "mlx5_0"}, "nics='mlx5_0' must be a tuple of texts"),
        ({"nics": (7,)}, r"nics=\(7,\) must be a tuple of texts"),
        ({"transports": None}, "transports=None must be a tuple of texts"),
        ({"keys": "secret"}, "^keys=str must be a tuple of bytes$"),
        ({"host": ""}, "empty"),
        ({"host": "0.0.0.0"}, "cannot be put on a card"),
        ({"host": "::"}, "cannot be put on a card"),
        ({"port": 70000}, "port=70000 must be between 0 and 65535"),
        ({"port_last": 20100}, "port=0 and port_last=20100: give the first and last port"),
        ({"port": 20100, "port_last": 20000}, "port=20100 and port_last=20000: give the first"),
        ({"traffic_class": 256}, "traffic_class=256 must be between 0 and 255"),
        ({"service_level": 16}, "service_level=16 must be between 0 and 15"),
        ({"partition_key_index": -1}, "partition_key_index=-1 must be between 0 and 65535"),
        ({"gid_index": 256}, "gid_index=256 must be between -1 and 255"),
        ({"rails_per_nic": 9}, "rails_per_nic=9 must be between 1 and 8"),
        ({"stall_timeout_s": 0.0}, "stall_timeout_s=0.0"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s=nan"),
        ({"max_queued_transfers": 0}, "max_queued_transfers=0"),
        ({"segment_blocks": 1021}, "segment_blocks=1021 must be between 1 and 1020"),
        ({"rails": 0}, "rails=0 must be between 1 and 8"),
        ({"workers": 5}, "workers=5 must be between 1 and 4"),
        ({"spin_s": -1.0}, "spin_s=-1.0 must be between"),
        ({"label": "x" * 201}, "label has 201 characters, and may have 200"),
        ({"segment_bytes": 0}, "segment_bytes=0"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"socket_buffer_bytes": -1}, "socket_buffer_bytes=-1"),
        ({"staging_slot_bytes": 4095}, "staging_slot_bytes=4095 must be between 4096 and"),
        ({"staging_bytes": (8 << 20) - 1}, "staging_bytes=8388607 must be between 8388608 and"),
        ({"staging_bytes": (512 << 20) + 1}, "staging_bytes=.* 8388608 and 536870912"),
        (
            {"topology": Path("/t.json"), "nics": ("mlx5_0",)},
            r"topology='/t.json' is complete: nics=\('mlx5_0',\) cannot be given beside it",
        ),
    ],
)
def test_config_refuses(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        te.Config(**changes)  # type: ignore[arg-type]


def test_every_field_of_config_is_of_a_kind_that_is_checked() -> None:
    te.Config(nics=["mlx5_0"], rails=np.int64(2), spin_s=0)  # type: ignore[arg-type]
    for one in dataclasses.fields(te.Config):
        with pytest.raises(ValueError, match=rf"^{one.name}=.* must be"):
            te.Config(**{one.name: object()})  # type: ignore[arg-type]


def a_card(**changes: object) -> Card:
    fields: dict[str, object] = {"protocol": PROTOCOL_VERSION, "id": "0" * 32, "epoch": 5}
    fields |= {"host": "h", "port": 1, "offers": {"tcp": b""}, "regions": []}
    return Card(**fields | changes)  # type: ignore[arg-type]


def test_cards_of_other_versions_name_both() -> None:
    data = msgspec.msgpack.encode({"protocol": 99, "something": "new"})
    said = f"te protocol 99, this engine speaks {PROTOCOL_VERSION}; run the same"
    with pytest.raises(te.VersionError, match=said):
        decode_card(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        encode(a_card())[:-1],
        encode(a_card(id="short")),
        encode(a_card(port=0)),
        encode(a_card(offers={f"t{i}": b"" for i in range(17)})),
        encode(a_card()) + bytes(1 << 20),
    ],
)
def test_garbage_is_not_a_card(data: bytes) -> None:
    with pytest.raises(te.HandshakeError, match="card"):
        decode_card(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_card_or_a_handshake_error(data: bytes) -> None:
    for decode in (decode_card, lambda body: decode_body(body, Welcome)):
        with contextlib.suppress(te.HandshakeError):
            decode(data)


FIRST_CARDS = """
import sys, threading
from te.handshake import PROTOCOL_VERSION, Card, decode_card, encode

sys.setswitchinterval(1e-6)
card = encode(Card(
    protocol=PROTOCOL_VERSION, id="0" * 32, epoch=1, host="h", port=1,
    offers={"tcp": b""}, regions=[],
))
start = threading.Barrier(8)
threads = [
    threading.Thread(target=lambda: (start.wait(), decode_card(card))) for _ in range(8)
]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_the_first_cards_of_a_process_may_come_at_once() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(te.__file__).parents[1])}
    # Every second such process crashed when msgspec looked the types over only then.
    for _ in range(8):
        subprocess.run([sys.executable, "-c", FIRST_CARDS], env=environment, check=True, timeout=60)
