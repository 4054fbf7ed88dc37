# SPDX-License-Identifier: Apache-2.0
"""Proofs of requests and answers, and replays, without any I/O."""

from __future__ import annotations

import pytest

from bootstrap_server.admission.proof import (
    Claim,
    RequestProof,
    digest_of,
    key_of,
    prove_answer,
    prove_request,
)
from bootstrap_server.admission.replays import SKEW_MAX_S, WINDOW, Replays
from bootstrap_server.admission.secret import mac

KEY, OTHER = b"k" * 32, b"o" * 32
CLAIM = Claim(1_700_000_000_000, b"c" * 16, 7, digest_of(b"body"))
PROOF = prove_request(KEY, "PUT", "/v1/instances?a=b", CLAIM)


def test_a_proof_goes_through_its_header() -> None:
    assert RequestProof.parse(str(PROOF)) == PROOF


def test_any_of_the_keys_is_found() -> None:
    for keys in ([KEY], [KEY, OTHER], [OTHER, KEY]):
        assert key_of(keys, "PUT", "/v1/instances?a=b", PROOF) == KEY
    for keys in ([], [OTHER]):
        assert key_of(keys, "PUT", "/v1/instances?a=b", PROOF) is None


@pytest.mark.parametrize(
    ("method", "path", "changes"),
    [
        ("GET", "/v1/instances?a=b", {}),
        ("PUT", "/v1/instances?a=c", {}),
        ("PUT", "/v1/instances", {}),
        ("PUT", "/v1/instances?a=b", {"time_ms": CLAIM.time_ms + 1}),
        ("PUT", "/v1/instances?a=b", {"client": b"d" * 16}),
        ("PUT", "/v1/instances?a=b", {"number": 8}),
        ("PUT", "/v1/instances?a=b", {"body_digest": digest_of(b"bode")}),
    ],
)
def test_a_mac_is_for_one_request(method: str, path: str, changes: dict[str, object]) -> None:
    changed = RequestProof(CLAIM._replace(**changes), PROOF.mac)
    assert key_of([KEY], method, path, changed) is None


def test_parts_do_not_run_into_each_other() -> None:
    assert mac(KEY, b"x", b"ab", b"c") != mac(KEY, b"x", b"a", b"bc")
    assert mac(KEY, b"x", b"ab") != mac(KEY, b"xa", b"b")


def test_no_body_is_an_empty_body() -> None:
    assert digest_of(None) == digest_of(b"")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "1",
        str(PROOF) + " ",
        str(PROOF)[:-1],
        str(PROOF).upper(),
        "2" + str(PROOF)[1:],
        str(PROOF).replace(" 7 ", " -7 "),
        str(PROOF).replace(" 7 ", " ٧ "),
        str(PROOF).replace(" 7 ", " " + "7" * 19 + " "),
        "\udcff" * 100,
    ],
)
def test_what_is_no_header_is_refused(header: str) -> None:
    with pytest.raises(ValueError, match="no proof of version 1"):
        RequestProof.parse(header)


def test_an_answer_is_for_one_request_and_never_a_request() -> None:
    answer = prove_answer(KEY, PROOF, 200, "", b"body")
    other = prove_request(KEY, "PUT", "/v1/instances?a=b", CLAIM._replace(number=8))
    assert answer == prove_answer(KEY, PROOF, 200, "", b"body")
    assert answer not in {
        prove_answer(OTHER, PROOF, 200, "", b"body"),
        prove_answer(KEY, other, 200, "", b"body"),
        prove_answer(KEY, PROOF, 201, "", b"body"),
        prove_answer(KEY, PROOF, 200, "gzip", b"body"),
        prove_answer(KEY, PROOF, 200, "", b"bodi"),
        f"1 {PROOF.mac.hex()}",
    }


# --- replays ---

NOW = 1_700_000_000.0


def take(replays: Replays, number: int, client: bytes = b"c", address: str = "a") -> str | None:
    return replays.refusal(client, number, NOW, NOW, address)


def test_a_request_is_taken_once_in_whichever_order_it_comes() -> None:
    replays = Replays()
    for number in (5, 3, 4, 6, 5 + WINDOW, 7):
        assert take(replays, number) is None
        assert "is a replay" in (take(replays, number) or "")
    assert "too old" in (take(replays, 5) or "")
    assert take(replays, 6 + WINDOW) is None
    assert "too old" in (take(replays, 1) or "")
    assert take(replays, 10**17) is None
    assert "too old" in (take(replays, 7 + WINDOW) or "")


def test_clients_are_numbered_apart() -> None:
    replays = Replays()
    assert take(replays, 1, b"c") is None
    assert take(replays, 1, b"d") is None


@pytest.mark.parametrize("apart_s", [SKEW_MAX_S + 1, -SKEW_MAX_S - 1])
def test_clocks_that_are_apart_are_named(apart_s: float) -> None:
    refusal = Replays().refusal(b"c", 1, NOW + apart_s, NOW, "a") or ""
    assert f"its clock says {NOW + apart_s:.0f} and ours {NOW:.0f}" in refusal
    assert Replays().refusal(b"c", 1, NOW + SKEW_MAX_S, NOW, "a") is None


def test_a_client_is_forgotten_when_all_of_its_requests_are_too_old() -> None:
    replays = Replays()
    ahead = NOW + SKEW_MAX_S
    assert replays.refusal(b"c", 1, ahead, NOW, "a") is None
    assert "before" in (replays.refusal(b"c", 1, ahead, ahead + SKEW_MAX_S - 1, "a") or "")
    assert "clocks" in (replays.refusal(b"c", 1, ahead, ahead + SKEW_MAX_S + 1, "a") or "")
    later = ahead + SKEW_MAX_S + 1
    assert replays.refusal(b"d", 1, later, later, "a") is None
    assert len(replays) == 1


def test_nobody_is_pushed_out() -> None:
    replays = Replays(clients_max=3, of_one_address_max=2)
    for client in (b"1", b"2"):
        assert take(replays, 1, client) is None
    assert "2 clients of this address" in (take(replays, 1, b"3") or "")
    assert take(replays, 1, b"4", "b") is None
    assert "3 in all are known" in (take(replays, 1, b"5", "c") or "")
    assert len(replays) == 3
    for client in (b"1", b"2", b"4"):
        assert take(replays, 2, client) is None
        assert "before" in (take(replays, 1, client) or "")
    later = NOW + 2 * SKEW_MAX_S
    assert replays.refusal(b"3", 1, later, later, "a") is None
