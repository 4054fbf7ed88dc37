# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers, shared by all tests of a module: starting a pair costs half a minute.

A module says with a module-scoped fixture `layout` what its pair looks like.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cpu_serving.expectations import Layout, Reference, Serving
from cpu_serving.servers import Fleet


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with Fleet(tmp_path_factory.mktemp("reference")) as fleet:
        yield Reference(fleet)


@pytest.fixture(scope="module")
def running(
    layout: Layout, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    with Fleet(tmp_path_factory.mktemp(layout.name)) as fleet:
        pair = fleet.pair(layout.prefill, layout.decode)
        pair.wait_ready()
        yield Serving(pair, layout.model, reference)


@pytest.fixture
def serving(running: Serving) -> Iterator[Serving]:
    """The module's pair; after each test it must be whole."""
    yield running
    running.assert_whole()
