# SPDX-License-Identifier: Apache-2.0
"""Servers of the other releases of SGLang that the package works with; a run has one of them. And a
prefill server of one release with a decode server of another. `scripts/sglang-releases` has all of
it for any release, and shows what each test has recorded as `seen`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from cpu_serving.expectations import Layout, Reference, Serving
from cpu_serving.nursery import Nursery
from cpu_serving.overlap import Overlap, read_counts
from cpu_serving.pools import leaked_pages
from cpu_serving.releases import environment_of, in_release
from cpu_serving.servers import Fleet
from cpu_serving.traffic import Request, make_requests, make_shared_requests, run
from direct import open_rooms
from interrupting import BOUND_S, WAITING, assert_failed_in_time, interrupted
from patient import patient
from release_servers import MODEL, Servers, neighbour, send_and_abort, serving_of
from serving_layouts import CHUNK, Case

from sglang_mooncake.release_numbers import text_of
from sglang_mooncake.sglang.releases import SERVED

pytestmark = [pytest.mark.serving, pytest.mark.timeout(900)]

RELEASES = [text_of(release) for release in SERVED]
#: The installed one.
NEWEST = RELEASES[-1]
#: What `scripts/sglang-releases` has, and other runs have not.
in_full = pytest.mark.in_full
REQUESTS = make_requests(16, 600, seed=21)
#: What has servers of its own. Chunks are small with overlap scheduling: most prompts have some.
OTHERS: dict[str, Callable[[], Layout]] = {
    "MLA": Case("deepseek", "tp1", "tp1", chunked=True).layout,
    "DP attention": Case("qwen3", "dp2", "dp2").layout,
    "overlap": lambda: Layout.equal(
        "overlap", chunked_prefill_size=CHUNK // 2, overlap=Overlap(delay_ms=60)
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    asked = metafunc.config.getoption("--sglang-release", None)
    names = [asked] if asked else RELEASES[:-1]
    params = [pytest.param(one, marks=pytest.mark.one_of("release", one)) for one in names]
    metafunc.parametrize("release", params, indirect=True, scope="module")
    if "other" in metafunc.fixturenames:
        others = {NEWEST, neighbour(asked)} - {asked} if asked else {NEWEST}
        metafunc.parametrize("other", sorted(others), indirect=True, scope="module")


@pytest.fixture(scope="module")
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def origin(release: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where servers of that release are forked."""
    log = tmp_path_factory.mktemp(f"nursery-{release}") / "nursery.log"
    with Nursery(environment_of(release), log) as made:
        yield made


@pytest.fixture(scope="module")
def servers(
    release: str, origin: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Of that release. Those that all runs need are started at once."""
    with Fleet(tmp_path_factory.mktemp(release), origin) as fleet:
        made = Servers(fleet, release)
        made.begin(("prefill", "tp1"), ("decode", "tp1"), ("decode", "tp2"))
        yield made


@pytest.fixture(scope="module")
def reference(servers: Servers, release: str) -> Reference:
    """One ordinary server of that release, started beside the others."""
    made = Reference(servers.fleet, lambda options: in_release(options, release))
    made.answers(MODEL, REQUESTS)
    return made


@pytest.fixture(scope="module")
def other(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Servers of another release."""
    name = str(request.param)
    folder = tmp_path_factory.mktemp(f"other-{name}")
    if name == NEWEST:
        with Fleet(folder, nursery) as fleet:
            yield Servers(fleet, name, is_installed=True)
    else:
        with (
            Nursery(environment_of(name), folder / "nursery.log") as made,
            Fleet(folder, made) as fleet,
        ):
            yield Servers(fleet, name)


def assert_equal_twice(serving: Serving, requests: list[Request]) -> str:
    """The second time prefixes of the prompts are there."""
    for _ in range(2):
        serving.assert_equal(requests, concurrency=8)
    serving.assert_whole()
    return f"2 x {len(requests)} of {len(requests)} requests equal, 0 pages leaked"


@pytest.mark.parametrize("layout", ["tp1-tp1", pytest.param("tp2-tp1", marks=in_full)])
def test_tokens_are_equal(
    layout: str,
    release: str,
    servers: Servers,
    reference: Reference,
    record_property: Callable[[str, object], None],
) -> None:
    forms = layout.split("-")
    prefill, decode = servers.get("prefill", forms[0]), servers.get("decode", forms[1])
    serving = serving_of(servers.fleet, prefill, decode, reference)
    record_property("seen", assert_equal_twice(serving, REQUESTS))
    for server in (prefill, decode):
        assert f"with SGLang {release}: " in server.process.log_text()


@pytest.mark.parametrize(
    ("count", "share"), [(24, 1.0), pytest.param(300, 0.2, marks=in_full)], ids=["all", "a fifth"]
)
def test_aborts_leave_nothing_behind(
    count: int,
    share: float,
    servers: Servers,
    reference: Reference,
    record_property: Callable[[str, object], None],
) -> None:
    """Two ranks on decode, which must agree when the pages of a failed request are free."""
    pair = servers.get("prefill", "tp1"), servers.get("decode", "tp2")
    serving = serving_of(servers.fleet, *pair, reference)
    requests = make_requests(count, 900 if share == 1 else 400, seed=22, new_tokens=32)
    aborted = send_and_abort(serving, requests, share, within_s=2.0 if share == 1 else 0.5, seed=23)
    assert aborted, "every request was answered before its abort"
    serving.assert_equal(make_requests(8, 500, seed=24))
    serving.assert_whole()
    record_property(
        "seen",
        f"tp1 to tp2: {aborted} of {count} requests aborted, all others equal, 0 pages leaked",
    )


@in_full
@pytest.mark.parametrize("name", OTHERS)
def test_tokens_are_equal_with(
    name: str,
    release: str,
    origin: Nursery,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
    record_property: Callable[[str, object], None],
) -> None:
    if name == "DP attention" and release == "0.5.18":
        pytest.skip("for DP attention this release pins memory of a GPU")
    layout = OTHERS[name]()
    with Fleet(tmp_path_factory.mktemp("others"), origin) as fleet:
        options = (in_release(patient(one), release) for one in (layout.prefill, layout.decode))
        pair = fleet.pair(*options)
        pair.wait_ready()
        make = make_shared_requests if layout.prefill.overlap else make_requests
        serving = Serving(pair, layout.model, reference)
        seen = assert_equal_twice(serving, make(32, 600, seed=26))
        if layout.prefill.overlap:
            counts = read_counts(pair.prefill.stats_dir)
            assert counts.taken, "no send came before its event"
            seen += f", {counts.waits} waits for events"
    record_property("seen", seen)


@pytest.mark.parametrize("old_role", ["prefill", "decode"])
def test_a_pair_of_two_releases(
    old_role: str,
    servers: Servers,
    other: Servers,
    reference: Reference,
    record_property: Callable[[str, object], None],
) -> None:
    """A server of this release, and one of another."""
    other.begin(("prefill", "tp1"), ("decode", "tp1"))
    first, second = (servers, other) if old_role == "prefill" else (other, servers)
    pair = first.get("prefill", "tp1"), second.get("decode", "tp1")
    serving = serving_of(other.fleet, *pair, reference)
    seen = assert_equal_twice(serving, make_requests(12, 600, seed=25))
    record_property("seen", f"prefill {first.release} to decode {second.release}: {seen}")


@in_full
def test_prefill_killed_and_restarted(
    servers: Servers, reference: Reference, record_property: Callable[[str, object], None]
) -> None:
    prefill, decode = servers.get("prefill", "tp1"), servers.get("decode", "tp1")
    before = serving_of(servers.fleet, prefill, decode, reference)
    kill = prefill.process.kill
    # Of one that has nothing to do but wait, SGLang 0.5.18 publishes no figures; ours are there.
    got = run(lambda session: interrupted(before.pair, kill, 32, session, open_rooms), BOUND_S)
    assert_failed_in_time(got)
    assert leaked_pages(decode, timeout_s=BOUND_S) == 0
    again = serving_of(servers.fleet, servers.again("prefill", "tp1"), decode, reference)
    seen = assert_equal_twice(again, make_requests(16, 600, seed=33))
    failed = sum(answer.error is not None for answer in got)
    record_property(
        "seen", f"{failed} of {len(got)} requests failed, {WAITING} of which waited; then {seen}"
    )
