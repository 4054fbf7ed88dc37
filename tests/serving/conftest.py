# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers, shared by all tests of a module: starting a pair costs seconds.

A module says with a module-scoped fixture `layout` what its pair looks like.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpu_serving.expectations import Layout, Reference, Serving
from cpu_serving.model import make_model
from cpu_serving.nursery import Nursery
from cpu_serving.servers import RESTING, Fleet, Server, ServerOptions, base_environment
from patient import PATIENT, patient


def pytest_addoption(parser: pytest.Parser) -> None:
    """For `scripts/sglang-releases`."""
    about = "of test_serving_releases.py: this release alone, and all that is known to be tried"
    parser.addoption("--sglang-release", help=about)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--sglang-release"):
        return
    left_out = {item for item in items if item.get_closest_marker("in_full")}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(scope="session", autouse=True)
def resting() -> Iterator[None]:
    """All servers, whoever starts them, but those of a layout that says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RESTING.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Where servers are forked: one that starts as a program needs ten times the CPU time."""
    log = tmp_path_factory.mktemp("nursery") / "nursery.log"
    with Nursery(base_environment(), log) as made:
        assert made.fits({**base_environment(), **PATIENT}), "shared pairs are forked"
        yield made


@pytest.fixture(scope="module")
def origin(nursery: Nursery) -> Nursery | None:
    """Where the module's pair comes from; a module whose servers shall start as a user's do has
    one that is None."""
    return nursery


@pytest.fixture(scope="session")
def reference(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Fleet(tmp_path_factory.mktemp("reference"), nursery) as fleet:
        yield Reference(fleet)


@pytest.fixture(scope="session")
def decode(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A decode server without special options, for tests that end the prefill server or change what
    it does; whoever asks it waits until it is ready."""
    with Fleet(tmp_path_factory.mktemp("decode"), nursery) as fleet:
        yield fleet.server("decode", patient(ServerOptions(make_model("llama"))))


@pytest.fixture(scope="module")
def running(
    layout: Layout,
    origin: Nursery | None,
    reference: Reference,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    with Fleet(tmp_path_factory.mktemp(layout.name), origin) as fleet:
        pair = fleet.pair(patient(layout.prefill), patient(layout.decode))
        pair.wait_ready()
        yield Serving(pair, layout.model, reference)


@pytest.fixture
def serving(running: Serving) -> Iterator[Serving]:
    """The module's pair; after each test it must be whole."""
    yield running
    running.assert_whole()
