# SPDX-License-Identifier: Apache-2.0
"""Commands in README.md and docs/ do what the programs can do: parsed by their own parsers,
planned, or run where that is harmless. A command that no rule covers fails."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_commands import (
    MANIFESTS,
    ROOT,
    UNITS,
    Command,
    blocks,
    commands,
    containers,
    launched,
    pages,
    program,
    unit_commands,
)
from program_help import help_of

from bootstrap_server import __main__ as registry
from kvstore import cli as kvstore
from kvstore.config import Config
from sglang_mooncake.sglang import cli as mooncake
from sglang_mooncake.sglang.dry_run.flags import FlagError, parse_flags
from sglang_mooncake.vllm.options import Options
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.pd_rank import ROLES
from te import cli as te
from te.checkout import of_checkout

pytestmark = pytest.mark.usefixtures("without_sglang")

COMMANDS = [*commands(), *unit_commands()]
#: As it is called in each release of SGLang; tests/sglang/test_docs_servers.py asks it.
SERVER = "sglang.launch_server"
#: For models by their names; others are planned as the first.
LAYOUTS = {"70B": "llama-70b", "Qwen3-235B": "qwen3-235b", "DeepSeek": "deepseek-v3"}
#: Commands of the system: nothing here can check what they do.
SYSTEM = {
    "apt-get",
    "chmod",
    "curl",
    "git",
    "grep",
    "ip",
    "mlnx_qos",
    "modprobe",
    "ssh",
    "sysctl",
    "ulimit",
}
OPTION = re.compile(r"--[a-z][a-z0-9-]*")

# Made once for two hundred commands: making one takes longer than reading a command.
te_parser = cache(lambda: te._parser(of_checkout("te_bench.command")))
kvstore_parser = cache(lambda: kvstore._parser(kvstore._tools()))
mooncake_parser = cache(mooncake._parser)
registry_help = cache(partial(help_of, registry.main))


def check(words: tuple[str, ...]) -> None:
    """Raises AssertionError or SystemExit where the command cannot be given like that."""
    name = program(words)
    if name.startswith("scripts/"):
        check_script(words)
        return
    rule = RULES.get(name)
    assert rule or name in SYSTEM, f"no rule in {Path(__file__).name} covers {name}"
    if rule:
        rule(words[1:])


def check_te(rest: tuple[str, ...]) -> None:
    te_parser().parse_args(rest)


def check_kvstore(rest: tuple[str, ...]) -> None:
    kvstore_parser().parse_args(rest)


def check_lmcache(rest: tuple[str, ...]) -> None:
    """The adapter, without LMCache, whose own parser reads the rest of it in tests/lmcache."""
    spec = json.loads(rest[rest.index("--l2-adapter") + 1])
    module = ROOT / f"{spec['module_path'].replace('.', '/')}.py"
    assert module.is_file()
    assert f"class {spec['class_name']}(" in module.read_text()
    Config.of(spec["adapter_params"])


def check_vllm(rest: tuple[str, ...]) -> None:
    """The connector, without vLLM; tests/vllm start servers with the same flag."""
    assert rest[0] == "serve"
    spec = json.loads(rest[rest.index("--kv-transfer-config") + 1])
    module = ROOT / f"{spec.pop('kv_connector_module_path').replace('.', '/')}.py"
    assert module.is_file()
    assert f"class {spec.pop('kv_connector')}(" in module.read_text()
    if module.stem == "pd_connector":
        PdOptions.of(spec.pop("kv_connector_extra_config", {}))
        assert spec.pop("kv_role") in ROLES
        assert spec in ({}, {"kv_load_failure_policy": "recompute"})
        return
    Options.of(spec.pop("kv_connector_extra_config"))
    assert spec == {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def check_mooncake(rest: tuple[str, ...]) -> None:
    mooncake_parser().parse_args(rest)
    if rest[:1] == ("plan",):
        assert mooncake.main(rest) == 0


def check_python(rest: tuple[str, ...]) -> None:
    if rest[:2] == ("-m", "bootstrap_server"):
        check_registry(rest[2:])
    elif rest[:2] == ("-m", SERVER):
        parse_flags(shlex.join(rest[2:]))
    elif rest[0] == "-c":
        compile(rest[1], "python -c", "exec")
    elif rest[:1] != ("-m",):
        assert (ROOT / rest[0]).is_file()
    else:
        known = {"sglang_router.launch_router", "json.tool", "venv", "te.cli", "pip"}
        assert rest[1] in known, f"python -m {rest[1]}"


def check_registry(rest: tuple[str, ...]) -> None:
    """Values are checked as they are read; options by the help text."""
    printed = registry_help(*rest)
    for option in (match[0] for word in rest if (match := OPTION.match(word))):
        assert re.search(re.escape(option) + r"(?![a-z-])", printed), option


def check_script(words: tuple[str, ...]) -> None:
    path = ROOT / words[0]
    assert path.is_file(), f"there is no {words[0]}"
    own, inner = words[1:], ()
    if "--" in own:
        at = own.index("--")
        own, inner = own[:at], own[at + 1 :]
    text = source(path)
    for option in (match[0] for word in own if (match := OPTION.match(word))):
        assert re.search(re.escape(option) + r"(?![a-z-])", text), f"{words[0]} has no {option}"
    if inner and not inner[0].startswith("-"):
        check(tuple(inner))


@cache
def source(script: Path) -> str:
    """Of a script and of the packages that it runs."""
    text = script.read_text()
    for package in {script.name.replace("-", "_"), *re.findall(r"-m (\w+)", text)}:
        text += "".join(
            one.read_text()
            for folder in ("scripts", "tests/support")
            for one in (ROOT / folder / package).rglob("*.py")
        )
    return text


def check_pip(rest: tuple[str, ...]) -> None:
    assert rest[0] == "install"


def check_docker(rest: tuple[str, ...]) -> None:
    if rest[0] == "run":
        image = next(i for i, word in enumerate(rest) if word == "sglang-mooncake")
        check(rest[image + 1 :])
    else:
        assert rest[0] == "build"


def check_kubectl(rest: tuple[str, ...]) -> None:
    if rest[:2] == ("apply", "-f"):
        assert (ROOT / rest[2]) in MANIFESTS
    else:
        assert rest[:2] == ("create", "secret")


RULES: dict[str, Callable[[tuple[str, ...]], None]] = {
    "docker": check_docker,
    "kubectl": check_kubectl,
    "kvstore": check_kvstore,
    "lmcache": check_lmcache,
    "pip": check_pip,
    "python": check_python,
    "python3": check_python,
    "sglang-mooncake": check_mooncake,
    "te": check_te,
    "vllm": check_vllm,
}


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_command_can_be_given(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check(command.words)
    except SystemExit as end:
        if end.code:  # Not that of --version.
            pytest.fail(f"{command}: exit status {end.code}: {capsys.readouterr().err}")


def test_a_command_that_cannot_be_given_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Without this an extraction that finds nothing would pass."""
    assert len(COMMANDS) > 60
    assert {c.page for c in COMMANDS} > {"README.md", "docs/quickstart.md"}
    wrong = (
        "te doctor --no-such",
        "sglang-mooncake plan --prefill tp=3 --decode tp=2 --model llama-70b",
        "python -m bootstrap_server --secret x",
        "scripts/demo --no-such",
        "scripts/no-such",
        'lmcache server --l2-adapter {"module_path":"kvstore.lmcache.adapter","class_name":"None"}',
        'vllm serve --kv-transfer-config {"kv_connector":"X","kv_connector_module_path":"te.cli"}',
        "docker run sglang-mooncake te topology --no-such",
        "frobnicate --all",
        "sglang launch_server --model-path m",
        "python -m sglang.launch_server --page-sise 64",
    )
    for one in wrong:
        with pytest.raises((AssertionError, FlagError, SystemExit)):
            check(tuple(one.split()))
    capsys.readouterr()


def launches(found: list[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The first command line of a prefill server, and the first of a decode server."""
    servers: dict[str, tuple[str, ...]] = {}
    for words in found:
        if SERVER in words and "--disaggregation-mode" in words:
            mode = words[words.index("--disaggregation-mode") + 1]
            servers.setdefault(mode, words[words.index(SERVER) + 1 :])
    return servers


def plan(servers: dict[str, tuple[str, ...]]) -> int:
    model = servers["prefill"][servers["prefill"].index("--model-path") + 1]
    layout = next((one for part, one in LAYOUTS.items() if part in model), LAYOUTS["70B"])
    arguments = ["plan", "--model", layout]
    for role in ("prefill", "decode"):
        arguments += [f"--{role}", shlex.join(servers[role])]
    return mooncake.main(arguments)


PAIRS = {
    f"{found[0].page} block {number}": launches([one.words for one in found])
    for number in sorted({one.block for one in COMMANDS})
    if (found := [one for one in COMMANDS if one.block == number])
}
PAIRS = {name: servers for name, servers in PAIRS.items() if len(servers) == 2}


@pytest.mark.parametrize("name", PAIRS)
def test_two_servers_of_one_example_fit(name: str) -> None:
    assert plan(PAIRS[name]) == 0


def test_there_are_pairs() -> None:
    assert len(PAIRS) >= 3


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_the_containers_of_a_manifest_run_servers_that_fit(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert all({"apiVersion", "kind", "metadata", "spec"} <= set(one) for one in documents)
    found = []
    for container in containers(documents):
        words = launched(container)
        check(words)
        found.append(words)
        mounted = {one["name"] for one in container.get("volumeMounts", ())}
        if SERVER in words:
            assert mounted >= {"secret", "infiniband", "shm"}
            assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert len(found) >= 3
    assert plan(launches(found)) == 0


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_what_systemd_needs(path: Path) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text().replace("\\\n", " "))
    assert list(unit) == ["DEFAULT", "Unit", "Service", "Install"]
    assert unit["Service"]["ExecStart"].startswith("/"), "systemd wants a whole path"
    assert unit["Service"]["LimitNOFILE"].isdecimal()


def test_there_are_manifests_and_all_yaml_is_yaml() -> None:
    assert {path.name for path in MANIFESTS} >= {"leaderworkerset.yaml", "rolebasedgroup.yaml"}
    for block in blocks():
        if block.language == "yaml" and "--8<--" not in block.text:
            assert isinstance(yaml.safe_load(block.text), dict), block.page


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [one for one in blocks() if one.language == "python"], ids=lambda one: one.page
)
def test_python_on_a_page_runs(block: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", block.text], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_variables_in_the_docs_exist() -> None:
    """Ours are in the reference that is written out of the code; SGLang's on the page or the list
    that is compared with SGLang."""
    variable = r"\bSGLANG_[A-Z0-9_]*[A-Z0-9]\b(?!_)"
    ours = set(re.findall(variable, (ROOT / "docs/configuration.md").read_text()))
    assert len(ours) > 20
    theirs = set(re.findall(variable, (ROOT / "docs/sglang-flags.md").read_text()))
    elsewhere = (ROOT / "tests/sglang/flags_elsewhere.toml").read_text()
    theirs |= set(re.findall(variable, elsewhere))
    theirs.add("SGLANG_USE_CPU_ENGINE")  # SGLang reads it past its own list of variables.
    missing = []
    for path in pages():
        for name in set(re.findall(variable, path.read_text())):
            known = ours if name.startswith("SGLANG_MOONCAKE_") else ours | theirs
            if name not in known:
                missing.append(f"{path.name}: {name}")
    assert not missing
