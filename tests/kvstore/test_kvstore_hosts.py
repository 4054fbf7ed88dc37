# SPDX-License-Identifier: Apache-2.0
"""Stores that meet at an index, as those of several hosts do: over TCP, with a secret."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from store_etcd import EtcdServer
from store_makers import SIG, Room, contents, engine, keys, until
from store_redis import RedisServer, at_index
from store_registry import RegistryServer
from te_ports import two_ports

import te
from bootstrap_server.admission.secret import Keys
from bootstrap_server.admission.secret_file import read_secret_file, write_secret_file
from kvstore.config import Config
from kvstore.objects.outcomes import Got, Put
from kvstore.owning import OwningStore
from kvstore.store import Store

MIB = 1 << 20
N, NBYTES = 8, 20_000
KEYS = keys(N)


def filled(store: Store) -> Room:
    room = Room(store, N, NBYTES)
    room.bytes[:] = contents(N, NBYTES)
    return room


def gets(store: Store, room: Room) -> bool:
    """All are there, and right."""
    room.bytes[:] = 0
    outcomes = store.get(KEYS, SIG, room.pieces)
    return outcomes == [Got.RIGHT] * N and bool((room.bytes == contents(N, NBYTES)).all())


@pytest.mark.slow
def test_objects_go_from_one_to_the_other(
    anywhere: RedisServer | EtcdServer | RegistryServer,
) -> None:
    with (
        OwningStore(at_index(anywhere.url, 8 * MIB)) as owner,
        OwningStore(at_index(anywhere.url)) as guest,
    ):
        room = filled(guest)
        until(lambda: guest.put(KEYS, SIG, room.pieces) == [Put.STORED] * N, "the owner is found")
        assert gets(owner, Room(owner, N, NBYTES))
        until(lambda: guest.exists(KEYS, SIG, NBYTES).all(), "they are announced")
        assert gets(guest, room)


@pytest.mark.slow
def test_an_owner_listens_at_two_ports_of_its_range(index: RedisServer | EtcdServer) -> None:
    """For firewalls: its engine at one, its answers at the other."""
    with two_ports(taken=0) as first:
        ports = engine(port=first, port_last=first + 1)
        near = at_index(index.url, 8 * MIB, engine=ports)
        with OwningStore(near) as owner, OwningStore(at_index(index.url)) as guest:
            room = filled(guest)
            until(lambda: guest.put(KEYS, SIG, room.pieces) == [Put.STORED] * N, "it is found")
            assert gets(owner, Room(owner, N, NBYTES))
            with pytest.raises(te.ListenError, match=f"none of the ports from {first} to"):
                OwningStore(replace(near, memory=0))
        with (
            socket.create_server(("127.0.0.1", first)),
            pytest.raises(OSError, match=r"none of the ports .*: an owner listens at two"),
        ):
            OwningStore(near)


@pytest.mark.slow
def test_another_secret_sees_nothing(
    index: RedisServer | EtcdServer, caplog: pytest.LogCaptureFixture
) -> None:
    other = Keys.from_secrets([b"another secret of the tests"])
    with (
        OwningStore(at_index(index.url, 8 * MIB)) as owner,
        OwningStore(at_index(index.url, keys=other)) as stranger,
    ):
        owner.put(KEYS, SIG, filled(owner).pieces)
        until(lambda: "does not have its secret" in caplog.text, "the stranger has seen the entry")
        assert not stranger.status().owners
        assert stranger.put(KEYS, SIG, filled(stranger).pieces) == [Put.UNREACHABLE] * N


@pytest.mark.slow
def test_a_killed_index_costs_nothing_but_new_processes(
    anywhere: RedisServer | EtcdServer | RegistryServer,
) -> None:
    """kill -9 under load, and a restart, without any memory but where etcd keeps it."""
    with (
        OwningStore(at_index(anywhere.url, 8 * MIB)) as owner,
        OwningStore(at_index(anywhere.url)) as guest,
    ):
        owner.put(KEYS, SIG, filled(owner).pieces)
        until(lambda: guest.exists(KEYS, SIG, NBYTES).all(), "the owner is followed")
        wrong: list[int] = []
        rounds, ended = [0], threading.Event()

        def load() -> None:
            room = Room(guest, N, NBYTES)
            while not ended.is_set():
                if not gets(guest, room):
                    wrong.append(rounds[0])
                rounds[0] += 1

        thread = threading.Thread(target=load)
        thread.start()

        def more(count: int) -> None:
            enough = rounds[0] + count
            until(lambda: rounds[0] > enough, "gets go on")

        more(20)
        anywhere.kill()
        more(200)
        anywhere.start()
        with OwningStore(at_index(anywhere.url)) as late:
            until(lambda: late.exists(KEYS, SIG, NBYTES).all(), "a new process has all keys")
            assert gets(late, Room(late, N, NBYTES))
        more(20)
        ended.set()
        thread.join()
        assert not wrong, f"{len(wrong)} of {rounds[0]} rounds were not right"


@pytest.mark.slow
def test_lent_by_the_command(index: RedisServer | EtcdServer, directory: Path) -> None:
    secret = directory / "secret"
    write_secret_file(secret)
    serve = [sys.executable, "-m", "kvstore", "serve", f"--directory={directory}"]
    process = subprocess.Popen(
        [*serve, "--memory=8MiB", "--index", index.url, "--secret-file", str(secret)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"kvstore: lends {8 * MIB} bytes, at the index\n"
        found = Keys.from_secrets(read_secret_file(secret))
        with OwningStore(at_index(index.url, keys=found)) as store:
            room = filled(store)
            until(lambda: store.put(KEYS, SIG, room.pieces) == [Put.STORED] * N, "it is found")
            until(lambda: gets(store, room), "and has them")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"index": "redis://127.0.0.1"}, "index needs a secret"),
        ({"secret_file": "/no/such/file"}, "cannot read the secret from /no/such/file"),
    ],
)
def test_settings_are_checked(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Config.of(given)


def test_no_address_leads_to_the_index() -> None:
    with pytest.raises(ValueError, match="no address of this host leads to the index"):
        OwningStore(at_index("redis://no-such-host.invalid"))
