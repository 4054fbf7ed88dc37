# SPDX-License-Identifier: Apache-2.0
"""scripts/rdma-testbed from outside: what passes through, what it refuses, what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rdma_testbed import kernel, packages
from rdma_testbed.errors import SetupError
from rdma_testbed.guest import Guest, exit_code, write_files
from rdma_testbed.processor import own_processor

#: Beside other tests on a busy machine, on which the kernel may have to be built first.
pytestmark = pytest.mark.timeout(1800)
BOOT_S = 300.0

SCRIPT = Path(__file__).parents[2] / "scripts" / "rdma-testbed"


def boot(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, check=False, timeout=BOOT_S, cwd=cwd
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command"),
        (["--nics", "0", "--", "true"], "--nics 0: between 1 and 16"),
        (["--driver", "mlx5", "--", "true"], "invalid choice: 'mlx5'"),
        (["--memory", "0", "--", "true"], "--memory 0: at least 1 GiB"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], says: str) -> None:
    done = boot(*arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_kernel_is_kept_outside_the_checkout_by_what_it_is_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = kernel.kernel_path()
    assert first.is_relative_to(tmp_path)
    changed = tmp_path / "kernel.config"
    changed.write_bytes(kernel.CONFIG.read_bytes() + b"CONFIG_MORE=y\n")
    monkeypatch.setattr(kernel, "CONFIG", changed)
    assert kernel.kernel_path() != first


def test_kernels_that_run_at_once_have_processors_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    with own_processor(tmp_path) as first:
        with own_processor(tmp_path) as second, own_processor(tmp_path) as third:
            assert (first, second) == (3, 5)
            assert third in {3, 5}
        with own_processor(tmp_path) as given_back:
            assert given_back == second


def test_missing_packages_are_named_to_those_who_may_not_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match=r"a test needs .* run: apt-get install no-such-package"):
        packages.ensure_programs({"no-such-program": "no-such-package"}, "a test")
    packages.ensure_programs({"sh": "dash"}, "a test")


def test_the_environment_and_the_command_reach_the_guest_unharmed(tmp_path: Path) -> None:
    """Whatever the shell could misread."""
    value, argument = "a 'b' \"c\" $HOME `d`\n", "x; exit 3 # '"
    guest = Guest(1, "rxe", ["printf", "%s", argument], tmp_path)
    write_files(tmp_path, guest, {"ODD": value, "not an identifier": "1"}, "/bin/busybox")
    done = subprocess.run(
        ["/bin/sh", "-c", f". {tmp_path}/run.sh"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, argument)
    text = (tmp_path / "run.sh").read_text()
    assert "not an identifier" not in text
    assert (tmp_path / "run.sh").stat().st_mode & 0o077 == 0
    assert exit_code(tmp_path) is None


@pytest.fixture(scope="module")
def built() -> None:
    """What boots has time for that alone."""
    kernel.ensure_kernel()


@pytest.mark.testbed
@pytest.mark.usefixtures("built")
def test_output_exit_code_and_files_pass_through(tmp_path: Path) -> None:
    script = "rdma link; echo complaint >&2; cat input >output; exit 7"
    (tmp_path / "input").write_text("bytes")
    done = boot("--nics", "3", "--", "sh", "-c", script, cwd=tmp_path)
    assert done.returncode == 7
    assert done.stdout.count("state ACTIVE") == 3
    # Whoever is the first on a machine is told what is built and installed there.
    own = [line for line in done.stderr.splitlines() if not line.startswith("rdma-testbed: ")]
    assert own == ["complaint"]
    assert (tmp_path / "output").read_text() == "bytes"


@pytest.mark.testbed
@pytest.mark.usefixtures("built")
def test_what_is_written_elsewhere_is_thrown_away(tmp_path: Path) -> None:
    mark = Path("/usr/local/sglang-mooncake-was-here")
    done = boot("--nics", "1", "--", "sh", "-c", f"touch {mark} && ls {mark}", cwd=tmp_path)
    assert done.stdout.strip() == str(mark)
    assert not mark.exists()


@pytest.mark.testbed
@pytest.mark.usefixtures("built")
def test_a_time_out_ends_everything_inside(tmp_path: Path) -> None:
    done = boot("--nics", "1", "--timeout", "5", "--", "sleep", "1000", cwd=tmp_path)
    assert done.returncode == 124
    assert "killed after 5 s" in done.stderr
    wait_until(lambda: not users_of(kernel.kernel_path(), tmp_path))


@pytest.mark.testbed
@pytest.mark.usefixtures("built")
def test_killing_the_script_ends_everything_inside(tmp_path: Path) -> None:
    with subprocess.Popen(
        [SCRIPT, "--nics", "1", "--", "sh", "-c", "touch ready; sleep 1000"],
        cwd=tmp_path,
        start_new_session=True,
    ) as process:
        wait_until(lambda: (tmp_path / "ready").exists())
        assert users_of(kernel.kernel_path(), tmp_path)
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not users_of(kernel.kernel_path(), tmp_path))


def users_of(program: Path, directory: Path) -> list[int]:
    """Processes of this kernel that were started in the directory."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "exe").resolve() == program and (entry / "cwd").resolve() == directory:
                found.append(int(entry.name))
        except OSError:
            continue  # it ended since the directory was read
    return found


def wait_until(condition: object, timeout_s: float = BOOT_S) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
