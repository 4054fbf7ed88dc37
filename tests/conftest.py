# SPDX-License-Identifier: Apache-2.0
"""Settings for every test: hypothesis is seeded, and in CI a skipped test is a failure."""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import os
from collections.abc import Generator, Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings, strategies
from testbed_nics import nics

# The machines that run this are small and shared: time per example says nothing there.
settings.register_profile(
    "house",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("house")
#: Hypothesis itself takes nine tenths of the time of such tests. The long layer has them again with
#: all examples. Fifty missed 21 of the 21,322 branches that a hundred reach: the tests that reach
#: them ask for a hundred here, too.
settings.register_profile("fast", parent=settings.get_profile("house"), max_examples=50)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "fast":
        settings.load_profile("fast")


@pytest.fixture(scope="session", autouse=True)
def status_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where engines of the tests, and of processes that these start, have their status sockets: not
    among those of the user's servers."""
    runtime = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(runtime))
        yield runtime / "te"


@pytest.fixture(scope="module")
def without_sglang() -> Iterator[None]:
    """`sglang-mooncake plan` as where SGLang is not installed: reading that takes seconds.
    tests/sglang/test_docs_servers.py has it read, and finds the same options."""
    from sglang_mooncake.sglang.dry_run.options import server_options

    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "sglang" else real(name, package)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", find_spec)
        server_options.cache_clear()
        yield
    server_options.cache_clear()


def _leaves_frozen_out() -> bool:
    from te_frozen import is_allowed

    return os.environ.get("CI") != "true" and not is_allowed()


def pytest_report_header() -> str | None:
    """What is left out must be said."""
    if not _leaves_frozen_out():
        return None
    return (
        "userfaultfd(2) is refused here: the tests that freeze memory are left out (root may, and"
        " everybody after: sysctl vm.unprivileged_userfaultfd=1)"
    )


#: Tests with such a mark take long, or need what ``scripts/test --fast`` does not have.
HEAVY = {"serving", "sglang", "vllm", "rdma", "testbed", "slow"}
#: So do all tests in these. Some cannot even be read without torch, say.
HEAVY_FOLDERS = {"lmcache", "rdma", "serving", "sglang"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is read for the tests stays until the end, so the garbage collector need not look at it.
    Else one ``gc.collect``, of a test or at the end, took as long as dozens of tests."""
    # hypothesis finds out what characters there are in 1.5 s of a processor, and keeps it in files.
    # Of processes that begin together one does so, and the others wait for it.
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        strategies.text().validate()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


#: A file with tests on RDMA devices has their mark, or parameters from where those have it.
OF_CONTRACT = ("te_contract", "te_transports")
ON_DEVICES = ("mark.rdma", *OF_CONTRACT)
#: In the same way a file that has more than fast tests, or some with hypothesis.
NOT_ONLY_FAST = (*(f"mark.{name}" for name in sorted(HEAVY)), *OF_CONTRACT, "hypothesis")
#: All tests of such a file are pure.
PURE = "\npytestmark = pytest.mark.pure\n"


@cache
def _says(file: Path, *words: str) -> bool:
    text = file.read_text()
    return any(word in text for word in words)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks what is fast, for ``-m fast``."""
    is_heavy = any(mark.name in HEAVY for mark in item.iter_markers())
    words = ON_DEVICES if item.get_closest_marker("rdma") else NOT_ONLY_FAST
    if is_heavy and not _says(item.path, *words):
        raise pytest.UsageError(
            f"{item.nodeid} may be left out of a run: its file has none of {', '.join(words)}"
        )
    if not is_heavy and item.path.parent.name not in HEAVY_FOLDERS:
        item.add_marker("fast")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders that have nothing fast are not read for ``-m fast``. Nor are files in which there is
    nothing for what is asked: on RDMA devices, as reading all takes a minute in an emulated
    machine, for sanitizers, and for what the fast layer leaves."""
    path, expression = collection_path, config.option.markexpr
    is_left_out = False
    if path.is_dir():
        is_left_out = expression == "fast" and path.name in HEAVY_FOLDERS
    elif path.suffix == ".py":
        is_left_out = (
            (expression == "rdma" and not _says(path, *ON_DEVICES))
            or (expression == "not rdma and not pure" and _says(path, PURE))
            or (
                expression.startswith("(not fast or hypothesis)")
                and path.parent.name not in HEAVY_FOLDERS
                and not _says(path, *NOT_ONLY_FAST)
            )
        )
    return True if is_left_out else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the kernel lets only root do (in CI it fails instead), and on RDMA devices
    the tests of the other driver, which run when its testbed is up."""
    drivers = {nic.driver for nic in nics()}
    left_out = {
        item
        for item in items
        if (item.get_closest_marker("userfaultfd") and _leaves_frozen_out())
        or (drivers and not {mark.args[0] for mark in item.iter_markers("driver")} <= drivers)
    }
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip hides a gap, so CI does not allow one (an expected failure is a skip, too)."""
    report = yield
    if os.environ.get("CI") == "true" and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
