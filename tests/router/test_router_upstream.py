# SPDX-License-Identifier: Apache-2.0
"""Connections to servers: used again, closed under the router's hands, held back, in pieces."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
from router_world import BOUND_S, run, stand_still, until

from sglang_mooncake.router import dialing
from sglang_mooncake.router import upstream as upstream_module
from sglang_mooncake.router.dialing import Addresses
from sglang_mooncake.router.upstream import (
    Answer,
    Broken,
    Exhausted,
    Stale,
    Unreachable,
    Upstream,
)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
SHORT = OK + b"Content-Length: 2\r\n\r\nab"


class Peer:
    """A server that does ``talk`` on each connection, and an ``Upstream`` that asks it."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self.connections = 0
        self.heads: list[bytes] = []
        self.upstream = Upstream()
        self._talking = 0
        self._answers: list[Answer] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for answer in self._answers:
            answer.close()
        self.upstream.close()
        self._server.close()
        await until(lambda: not self._talking)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._talking += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # The router has left.
            await self._talk(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self._talking -= 1

    async def asked(self, reader: asyncio.StreamReader) -> bytes:
        """The body of the next request."""
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        length = self.heads[-1].split(b"Content-Length: ")[1].split(b"\r\n")[0]
        return await reader.readexactly(int(length))

    async def ask(self, raw: bytes = b"{}") -> Answer:
        url = f"http://127.0.0.1:{self.port}"
        self._answers.append(await self.upstream.post(url, "/generate", {}, raw))
        return self._answers[-1]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is given up, or too old to be used again, because the machine was busy."""
    for name in ("CONNECT_S", "KEEPALIVE_S"):
        monkeypatch.setattr(upstream_module, name, BOUND_S)


async def whole(answer: Answer) -> bytes:
    body = bytearray()
    while part := await answer.read():
        body += part
    return bytes(body)


def answering(*answers: bytes) -> Peer:
    """One after another, on each connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for raw in answers:
            await peer.asked(reader)
            writer.write(raw)

    peer = Peer(talk)
    return peer


def test_a_connection_is_used_again_and_by_one_request_at_a_time() -> None:
    async def job() -> None:
        async with answering(SHORT, SHORT, SHORT) as peer:
            first = await peer.ask()
            second = await peer.ask()
            assert peer.connections == 2
            for answer in (first, second):
                assert (answer.status, answer.content_length) == (200, 2)
                assert await whole(answer) == b"ab"
                answer.release()
                answer.release()
                answer.close()  # It is not this one's any more.
            again = [await peer.ask(), await peer.ask()]
            assert [await whole(answer) for answer in again] == [b"ab", b"ab"]
            assert peer.connections == 2
            assert f"Host: 127.0.0.1:{peer.port}\r\n".encode() in peer.heads[0]

    run(job())


def test_what_has_gone_silent_at_a_server_that_is_ill_is_given_up() -> None:
    """What has come whole is left alone, and so is what the router holds back itself."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kind = await peer.asked(reader)
        if kind == b"whole":
            writer.write(SHORT)
        elif kind != b"nothing":
            writer.write(OK + b"Content-Length: 9999999\r\n\r\n")
            writer.write(b"a" * (4 << 20 if kind == b"much" else 1))
        await reader.read()  # Until the router closes it.

    peer = Peer(talk)

    async def job() -> None:
        async with peer:
            url = f"http://127.0.0.1:{peer.port}"
            entire, begun, much = [await peer.ask(one) for one in (b"whole", b"begun", b"much")]
            waiting = asyncio.create_task(peer.ask(b"nothing"))
            await until(lambda: len(peer.heads) == 4)
            assert await begun.read() == b"a"
            await until(lambda: much._connection._is_held)
            peer.upstream.give_up(url, 60.0)
            peer.upstream.give_up("http://127.0.0.1:1", 0.0)
            assert not waiting.done()
            peer.upstream.give_up(url, 0.0)
            with pytest.raises(Broken, match="gone silent"):
                await waiting
            with pytest.raises(Broken, match="gone silent"):
                await begun.read()
            assert await whole(entire) == b"ab"
            come = 0
            while come < 4 << 20:
                come += len(await much.read())
            entire.release()
            peer.upstream.give_up(url, 0.0)
            assert entire._connection.is_fresh(asyncio.get_running_loop().time())

    run(job())


def test_a_host_that_vanishes_is_noticed_by_its_connections() -> None:
    async def job() -> None:
        async with answering(SHORT) as peer:
            connected = await dialing.Dialer().connect("127.0.0.1", peer.port)
            with connected:
                assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                idle_s, every_s, count, unsent_ms = (
                    connected.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_KEEPCNT,
                        socket.TCP_USER_TIMEOUT,
                    )
                )
                assert idle_s + count * every_s == unsent_ms / 1000 == dialing.GONE_S

    run(job())


def test_connections_that_nobody_uses_are_closed_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        async with answering(*[SHORT] * 9) as peer:
            answers = [await peer.ask() for _ in range(3)]
            monkeypatch.setattr(upstream_module, "KEEPALIVE_S", 0.05)
            for answer in answers:
                assert await whole(answer) == b"ab"
                answer.release()
            await until(lambda: not peer._talking)
            assert not peer.upstream._idle, "nothing is remembered of the server"
            assert peer.connections == 3
            monkeypatch.setattr(upstream_module, "KEEPALIVE_S", 60.0)
            for _ in range(2):
                answer = await peer.ask()
                assert await whole(answer) == b"ab"
                answer.release()
            assert peer.connections == 4

    run(job())


@pytest.mark.parametrize("is_read", [False, True])
def test_a_connection_is_not_used_again_while_it_may_bring_something(is_read: bool) -> None:
    more = OK + b"Content-Length: 2\r\n\r\n" + (b"abc" if is_read else b"a")

    async def job() -> None:
        async with answering(more, SHORT) as peer:
            answer = await peer.ask()
            if is_read:
                assert await whole(answer) == b"ab"
            answer.release()
            await peer.ask()
            assert peer.connections == 2

    run(job())


def test_one_that_was_closed_meanwhile_or_is_idle_for_long_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def job() -> None:
        async with answering(SHORT) as peer:
            for connections in (1, 2):
                answer = await peer.ask()
                await whole(answer)
                answer.release()
                if connections == 1:  # The server has closed it; until that is known it counts.
                    await until(lambda: answer._connection._is_lost)  # noqa: B023
                assert peer.connections == connections
        async with answering(SHORT, SHORT, SHORT) as peer:
            monkeypatch.setattr(upstream_module, "KEEPALIVE_S", 0.0)
            two = [await peer.ask(), await peer.ask()]
            for answer in two:
                await whole(answer)
                answer.release()
            await whole(await peer.ask())
            assert peer.connections == 3

    run(job())


def test_one_that_is_closed_as_it_is_used_again_is_told_from_one_that_breaks() -> None:
    """The others that rest are as old, and are not used either."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.asked(reader)
        if peer.connections == 3:
            return
        writer.write(SHORT)
        if await peer.asked(reader) == b"half":
            writer.write(SHORT[:5])

    peer = Peer(talk)

    async def job() -> None:
        async with peer:
            two = [await peer.ask(), await peer.ask()]
            for answer in two:
                await whole(answer)
                answer.release()
            with pytest.raises(Stale, match="before its answer"):
                await peer.ask()
            with pytest.raises(Broken) as broken:  # Its first request was not answered.
                await peer.ask()
            assert broken.type is Broken
            assert peer.connections == 3
            answer = await peer.ask()
            await whole(answer)
            answer.release()
            with pytest.raises(Broken) as broken:  # The server has begun to answer.
                await peer.ask(b"half")
            assert broken.type is Broken
            assert peer.connections == 4

    run(job())


def test_a_router_without_a_descriptor_says_that_it_is_the_one() -> None:
    async def job() -> None:
        async with answering(SHORT) as peer:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                with pytest.raises(Exhausted, match=r"the router cannot connect .*open files"):
                    await peer.ask()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await whole(await peer.ask())

    run(job())


def test_a_connection_of_its_own_is_one_that_nothing_was_asked_on() -> None:
    async def job() -> None:
        async with answering(SHORT, SHORT) as peer:
            answer = await peer.ask()
            await whole(answer)
            answer.release()
            url = f"http://127.0.0.1:{peer.port}"
            (await peer.upstream.post(url, "/generate", {}, b"{}", is_new=True)).close()
            assert peer.connections == 2
            (await peer.ask()).close()
            assert peer.connections == 2

    run(job())


def test_bytes_that_nobody_has_asked_for_close_a_connection() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.asked(reader)
        writer.write(SHORT)
        await go_on.wait()
        writer.write(SHORT)
        await reader.read()

    peer, go_on = Peer(talk), asyncio.Event()

    async def job() -> None:
        async with peer:
            answer = await peer.ask()
            await whole(answer)
            answer.release()
            go_on.set()
            await until(lambda: answer._connection._is_lost)
            await peer.ask()
            assert peer.connections == 2

    run(job())


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "closed the connection before its answer"),
        (OK + b"Content-Length: 9\r\n\r\nab", "closed the connection in the middle"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", "in the middle"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nx\r\n", "no size of a chunk"),
        (b"220 mail\r\n\r\n", "no begin of an answer"),
    ],
    ids=str,
)
def test_half_an_answer_is_a_broken_one(raw: bytes, words: str) -> None:
    async def job() -> None:
        async with answering(raw) as peer:
            with pytest.raises(Broken, match=words):
                await whole(await peer.ask())

    run(job())


def test_a_body_that_ends_with_its_connection_is_whole_unless_that_broke() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = peer.connections
        await peer.asked(reader)
        writer.write(OK + b"\r\nab")
        await go_on.wait()
        if number == 2:
            linger = b"\1\0\0\0\0\0\0\0"  # A reset in place of an orderly end.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    peer, go_on = Peer(talk), asyncio.Event()

    async def job() -> None:
        async with peer:
            answers = [await peer.ask(), await peer.ask()]
            assert [await answer.read() for answer in answers] == [b"ab", b"ab"]
            go_on.set()
            assert await answers[0].read() == b""
            with pytest.raises(Broken, match="reset"):
                await answers[1].read()

    run(job())


def test_a_server_is_held_back_by_who_does_not_read() -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await peer.asked(reader)
        writer.write(OK + b"\r\n")
        for _ in range(32):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1

    peer = Peer(talk)

    async def job() -> None:
        async with peer:
            answer = await peer.ask()
            await until(lambda: answer._connection._is_held)
            assert sent < 32
            assert len(await whole(answer)) == 32 << 20

    run(job())


def test_a_long_request_is_sent_in_pieces_and_no_further_than_it_is_wanted() -> None:
    read = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if peer.connections == 1:
            bodies.append(await peer.asked(reader))
        else:
            await reader.readuntil(b"\r\n\r\n")
        writer.write(SHORT)
        await read.wait()

    peer, bodies, raw = Peer(talk), list[bytes](), bytes(range(256)) * (32 << 10)

    async def job() -> None:
        async with peer:
            answer = await peer.ask(raw)
            assert await whole(answer) == b"ab"
            assert bodies == [raw]
            refused = await peer.ask(raw * 8)
            assert await whole(refused) == b"ab"
            refused.release()
            assert refused._connection._transport.is_closing(), "the rest would be another request"
            read.set()

    run(job())


def test_a_server_that_leaves_while_it_is_sent_a_long_request_breaks_it() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    async def job() -> None:
        async with Peer(talk) as peer:
            with pytest.raises(Broken):
                await peer.ask(b"x" * (64 << 20))

    run(job())


def test_one_that_stops_asking_closes_its_connection() -> None:
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await peer.asked(reader)
        await reader.read()
        ended.set()

    peer = Peer(talk)

    async def job() -> None:
        async with peer:
            task = asyncio.create_task(peer.ask())
            await until(lambda: peer.heads)
            task.cancel()
            await ended.wait()

    run(job())


def test_a_server_that_does_not_accept_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        upstream = Upstream()
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            port = full.getsockname()[1]
            with pytest.raises(Unreachable, match=rf"cannot connect to 127\.0\.0\.1:{port}: "):
                await upstream.post(f"http://127.0.0.1:{port}", "/", {}, b"")
            full.listen(0)
            waiting = [socket.socket() for _ in range(4)]
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", port))
            monkeypatch.setattr(upstream_module, "CONNECT_S", 0.05)
            with pytest.raises(Unreachable, match=r"no connection within 0\.05 s"):
                await upstream.post(f"http://127.0.0.1:{port}", "/", {}, b"")
            for one in waiting:
                one.close()

    run(job())


def test_a_server_that_accepts_is_not_given_up_because_the_loop_stood_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A burst of requests keeps it busy for longer than a connection may take to be made."""
    monkeypatch.setattr(upstream_module, "CONNECT_S", 0.1)

    async def job() -> None:
        async with answering(SHORT) as peer:
            asking = asyncio.create_task(peer.ask())
            loop = asyncio.get_running_loop()
            for _ in range(4):
                loop.call_soon(stand_still, 0.15)
                await asyncio.sleep(0)
            assert await whole(await asking) == b"ab"

    run(job())


def test_a_name_is_looked_up_once_for_all_and_its_next_address_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first address of the name swallows what is sent to it."""
    looked_up = list[tuple[str, int]]()

    async def job() -> None:
        async with answering(SHORT, SHORT) as peer:
            with socket.socket() as full:
                full.bind(("127.0.0.2", peer.port))
                full.listen(0)
                waiting = [socket.socket() for _ in range(4)]
                for one in waiting:
                    one.setblocking(False)
                    one.connect_ex(("127.0.0.2", peer.port))

                loop = asyncio.get_running_loop()
                look_up = loop.getaddrinfo

                async def getaddrinfo(host: str, port: int, **more: Any) -> Addresses:
                    if host.startswith("127."):  # uvloop looks addresses up, too.
                        return await look_up(host, port, **more)
                    looked_up.append((host, port))
                    await asyncio.sleep(0)
                    if len(looked_up) == 1:
                        raise socket.gaierror(socket.EAI_AGAIN, "not now")
                    place = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
                    return [(*place, (f"127.0.0.{n}", port)) for n in (2, 1)]

                monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo)
                url = f"http://decode-0.svc:{peer.port}"
                post = partial(peer.upstream.post, url, "/generate", {}, b"{}")
                failed = await asyncio.gather(post(), post(), return_exceptions=True)
                assert [str(one) for one in failed] == [
                    f"cannot connect to decode-0.svc:{peer.port}: not now"
                ] * 2
                assert len(looked_up) == 1
                for answer in await asyncio.gather(*(post() for _ in range(20))):
                    assert await whole(answer) == b"ab"
                    answer.close()
                assert looked_up == [("decode-0.svc", peer.port)] * 2
                monkeypatch.setattr(dialing, "ADDRESSES_S", -1.0)
                (await post()).close()
                assert len(looked_up) == 3
                for one in waiting:
                    one.close()

    run(job())


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Of a server called localhost, whom all clients of this process believe."""
    key, shown = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-keyout", key, "-out", shown, "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=DNS:localhost"),
        ],
        check=True,
        capture_output=True,
    )
    monkeypatch.setenv("SSL_CERT_FILE", str(shown))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(shown, key)
    return context


def test_a_server_is_asked_over_tls_if_its_certificate_is_its_own(
    certificate: ssl.SSLContext,
) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)
                writer.write(SHORT)
        writer.close()

    async def job() -> None:
        upstream = Upstream()
        server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=certificate)
        port = server.sockets[0].getsockname()[1]
        for _ in range(2):
            answer = await upstream.post(f"https://localhost:{port}", "/", {}, b"{}")
            assert await whole(answer) == b"ab"
            answer.release()
        assert connections == 1
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await upstream.post(f"https://127.0.0.1:{port}", "/", {}, b"{}")
        upstream.close()
        server.close()

    run(job())


def test_https_begins_with_tls_and_a_path_stays_before_the_routes() -> None:
    begins: list[bytes] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begins.append(await reader.read(5000))

    async def job() -> None:
        async with Peer(talk) as peer:
            with pytest.raises(Unreachable):
                await peer.upstream.post(f"https://127.0.0.1:{peer.port}", "/", {}, b"")
            url = f"http://127.0.0.1:{peer.port}/servers/1"
            with pytest.raises(Broken):
                await peer.upstream.post(url, "/generate", {}, b"")
            assert begins[0].startswith(b"\x16\x03")  # A handshake of TLS.
            assert begins[1].startswith(b"POST /servers/1/generate HTTP/1.1\r\n")

    run(job())
