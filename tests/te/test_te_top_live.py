# SPDX-License-Identifier: Apache-2.0
"""``te top`` on engines of other processes: in a terminal, in a pipe, as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import te_busy
from te_far import wait_until, wait_until_stopped

import te
from te import cli
from te.status import StatusSocket
from te.top import command

pytestmark = pytest.mark.pure

TIMEOUT_S = 60.0
TE = [sys.executable, "-m", "te.cli", "top"]
#: The same, for engines that may stand still for seconds before they answer. What a shell starts in
#: the background ignores SIGINT, and so would all that these tests start.
PATIENT = [sys.executable, "-c", f"""
import signal, sys
from te import cli
from te.top import command
signal.signal(signal.SIGINT, signal.default_int_handler)
command.TIMEOUT_S = {TIMEOUT_S}
sys.exit(cli.main())
""", "top"]  # fmt: skip
#: What a terminal is told besides text.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")
HOME = "\x1b[H"


def environment(directory: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return kept | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_RUNTIME_DIR": str(directory),
        "TERM": "xterm-256color",
    }


@dataclass
class Busy:
    """A process whose engine writes all the time."""

    pid: int
    source: str
    target: str
    runtime: Path


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[Busy]:
    command = [sys.executable, te_busy.__file__]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment(tmp_path)
    ) as process:
        try:
            assert process.stdout is not None
            yield Busy(process.pid, *process.stdout.readline().split(), tmp_path)
        finally:
            process.kill()


@dataclass
class Terminal:
    """``te top`` in a terminal of its own, of so many columns."""

    fd: int
    process: subprocess.Popen[bytes]
    output: str = field(default="")

    def screen(self) -> str:
        """What it shows now, without colours."""
        with contextlib.suppress(BlockingIOError, OSError):  # EIO: it has ended.
            while data := os.read(self.fd, 1 << 16):
                self.output += data.decode(errors="replace")
        return CONTROL.sub("", self.output.rpartition(HOME)[2])

    def types(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def status(self) -> int:
        """Once it has ended. Until then what it writes is read, as a terminal does: else it would
        wait for that."""

        def has_ended() -> bool:
            self.screen()
            return self.process.poll() is not None

        wait_until(has_ended, "it has ended")
        return self.process.wait()


@contextlib.contextmanager
def terminal(runtime: Path, columns: int, *arguments: str) -> Iterator[Terminal]:
    fd, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 30, columns, 0, 0))
    os.set_blocking(fd, False)
    process = subprocess.Popen(
        [*PATIENT, f"--dir={runtime / 'te'}", *arguments],
        stdin=inside, stdout=inside, stderr=inside,
        env=environment(runtime), start_new_session=True,
    )  # fmt: skip
    try:
        yield Terminal(fd, process)
    finally:
        process.kill()
        process.wait()
        os.close(inside)
        os.close(fd)


def once(
    runtime: Path, *arguments: str, command: Sequence[str] = PATIENT
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, f"--dir={runtime / 'te'}", "--once", "--interval", "0.3", *arguments],
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment(runtime),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "key"), [(140, b"q"), (60, b"\x03")])
def test_the_screen_shows_rates_until_a_key_ends_it(busy: Busy, columns: int, key: bytes) -> None:
    rate = re.compile(rf"→ {busy.target[:8]} at 127.0.0.1:.*?\s[\d.]+ [kMG]B\s+0 B")
    with terminal(busy.runtime, columns, "--interval", "0.2") as top:
        shown = ""

        def is_shown() -> bool:
            """A rate, on a screen that has come to its last line."""
            nonlocal shown
            shown = top.screen()
            return bool(rate.search(shown)) and "q ends" in shown

        wait_until(is_shown, "a rate is shown")
        assert f"pid {busy.pid}  te_busy.py" in shown
        assert f"← {busy.source[:8]}" in shown
        assert all(len(line) <= columns for line in shown.splitlines())
        assert ("received" in shown) == (columns == 140)
        if key == b"\x03":
            os.killpg(top.process.pid, signal.SIGINT)
        else:
            top.types(b"x" + key)
        assert top.status() == (0 if key == b"q" else 130)
        top.screen()
        assert top.output.endswith("\x1b[?25h\x1b[?1049l")  # Cursor and screen are as before.
        flags = termios.tcgetattr(top.fd)[3]
        assert flags & termios.ICANON
        assert flags & termios.ECHO
        assert "Traceback" not in top.output


#: The first look is interrupted in a callback of a weak reference, from where nothing is raised.
LOOKS = """
import os, signal, sys, weakref
from te.top.rates import Sample
from te.top.screen import show

class Asked:
    pass

# What a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
looks = []

def interrupt(_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100):
        len(looks)

def look():
    looks.append(1)
    if len(looks) == 2:
        sys.exit("it goes on")
    asked = Asked()
    kept = weakref.ref(asked, interrupt)
    del asked
    return Sample(float(len(looks)), (), ())

show(look, 0.1, "nobody")
"""


@pytest.mark.slow
def test_an_interrupt_while_engines_are_asked_is_not_forgotten() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS],
        env=environment(Path.home()),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert "it goes on" not in done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode == -signal.SIGINT


@pytest.mark.slow
def test_the_screen_waits_for_engines(tmp_path: Path) -> None:
    with terminal(tmp_path, 100, "--interval", "0.1") as top:
        wait_until(lambda: "No engine of this user is running" in top.screen(), "it says so")
        top.types(b"Q")
        assert top.status() == 0


@pytest.mark.slow
def test_one_table_in_a_pipe(busy: Busy) -> None:
    done = once(busy.runtime)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rest = done.stdout.splitlines()
    assert head.split() == [
        "state",
        "out/s",
        "in/s",
        "sent",
        "received",
        "in",
        "flight",
        "done",
        "failed",
    ]
    links = [line for line in rest if "→" in line and busy.target[:8] in line]
    assert len(links) == 1
    assert re.search(r"tcp +[\d.]+ [kMG]B +0 B +[\d.]+ [kMG]B +0 B +\d+ +\d+ +0$", links[0])
    assert sum(line.startswith("    0 127.0.0.1:") for line in rest) == 1
    assert "\x1b" not in done.stdout


@pytest.mark.slow
def test_json_has_all_figures(busy: Busy) -> None:
    def all_are_above_zero() -> bool:
        """A machine that stands still between two looks moves nothing."""
        done = once(busy.runtime, "--json", "--pid", str(busy.pid))
        assert (done.returncode, done.stderr) == (0, "")
        answer = json.loads(done.stdout)
        assert answer["problems"] == []
        by_id = {one["status"]["id"]: one for one in answer["engines"]}
        assert set(by_id) == {busy.source, busy.target}
        source, target = by_id[busy.source], by_id[busy.target]
        done_n = source["links"][0]["stats"]["outcomes"]["transfers_done"]
        return bool(min(source["rate"]["sent"], target["rate"]["received"], done_n) > 0)

    wait_until(all_are_above_zero, "all figures are above 0")


def sent_by(engine: str, line: str) -> int:
    """The engine that is busiest comes first, and two are equally busy."""
    found = [one["status"] for one in json.loads(line)["engines"]]
    (nbytes,) = (int(one["stats"]["bytes_sent"]) for one in found if one["id"] == engine)
    return nbytes


@pytest.mark.slow
def test_json_lines_until_the_reader_has_enough(busy: Busy) -> None:
    with subprocess.Popen(
        [*PATIENT, f"--dir={busy.runtime / 'te'}", "--json", "--interval", "0.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(busy.runtime),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        lines = process.stdout
        first = sent_by(busy.source, lines.readline())
        wait_until(lambda: sent_by(busy.source, lines.readline()) > first, "a line tells of more")
        lines.close()
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_a_long_table_is_cut_unless_all_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LINES_MAX", 12)
    monkeypatch.setattr(command, "TIMEOUT_S", TIMEOUT_S)
    arguments = ["top", "--once", "--interval=0.1", f"--dir={tmp_path / 's'}"]
    with contextlib.ExitStack() as stack:
        for i in range(8):
            config = te.Config(transports=("tcp",), status_dir=tmp_path / "s", label=f"engine {i}")
            stack.enter_context(te.Engine(config))
        assert cli.main(arguments) == 0
        found = capsys.readouterr().out.splitlines()
        assert cli.main([*arguments, "--all"]) == 0
        whole = capsys.readouterr().out.splitlines()
    assert found[-2:] == ["… 3 more engines", "--all shows every engine and every link."]
    assert len(found) == 12 + 1
    engines = [line for line in whole if line.startswith("pid ")]
    assert {line.split()[3] for line in engines} == {str(i) for i in range(8)}


def test_all_is_for_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--all"]) == 2
    assert capsys.readouterr().err == "te top: --all is for --once\n"


@pytest.mark.slow
def test_other_processes_are_left_out(busy: Busy) -> None:
    done = once(busy.runtime, "--pid", "1")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("No engine of this user is running (looked in ")


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_named(busy: Busy, tmp_path: Path) -> None:
    """It was stopped, or runs another version; the others are shown all the same."""
    other = StatusSocket(busy.runtime / "te", "other", {"engine": lambda _: {"id": 3}})
    try:
        done = once(busy.runtime)
    finally:
        assert other.close(TIMEOUT_S)
    assert done.returncode == 0
    assert busy.target[:8] in done.stdout
    assert f"pid {os.getpid()} runs another version of te: " in done.stdout
    os.kill(busy.pid, signal.SIGSTOP)
    wait_until_stopped(busy.pid)
    done = once(busy.runtime, command=TE)
    assert done.returncode == 1
    assert f"pid {busy.pid}: " in done.stdout
    assert "did not answer 'engine' within 2.0 s" in done.stdout


def test_a_directory_that_is_not_the_users_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "te").mkdir(mode=0o755)
    done = once(tmp_path)
    assert done.returncode == 1
    assert "mode 0755, so other users may enter it" in done.stdout


@pytest.mark.slow
def test_without_a_terminal_it_says_what_to_use(busy: Busy) -> None:
    done = subprocess.run(
        TE, capture_output=True, text=True, check=False, timeout=60, env=environment(busy.runtime)
    )
    assert done.returncode == 2
    assert done.stderr == "te top: the live view needs a terminal: use --once or --json\n"


def test_without_rich_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "rich" else real(name)
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["top"]) == 2
    assert "pip install rich; te top --once needs nothing" in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "0.05"])
def test_an_interval_that_cannot_be_is_refused(
    interval: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", "--once", f"--interval={interval}"]) == 2
    assert "must be at least 0.1 s" in capsys.readouterr().err
