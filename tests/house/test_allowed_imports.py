# SPDX-License-Identifier: Apache-2.0
"""What each part may import from elsewhere, and which variables it may name: lists of what is
allowed, so that what nobody has thought of is refused. Which module of ours knows which:
pyproject.toml (import-linter)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["te", "te_bench", "bootstrap_server", "kvstore", "kvstore_tools", "sglang_mooncake"]
SGLANGS = "sglang_mooncake/sglang"
VLLMS = "sglang_mooncake/vllm"

#: Folder → what its modules import beside Python's own; the deepest folder of a module counts.
ALLOWED = {
    "te": {"msgspec", "numpy"},
    "te/top": {"msgspec", "rich"},  # the live view alone needs rich
    # Of these, what is installed.
    "te_bench": {"matplotlib", "mooncake", "msgspec", "nixl", "numpy", "te"},
    "bootstrap_server": {"aiohttp", "msgspec", "uvloop"},
    "bootstrap_server/admission": {"aiohttp", "msgspec", "zmq"},
    "bootstrap_server/client": {"msgspec"},
    "bootstrap_server/http": {"aiohttp", "msgspec"},
    "bootstrap_server/page": {"aiohttp", "msgspec"},
    "bootstrap_server/ranks": {"msgspec"},
    "bootstrap_server/settings": set(),
    "kvstore": {"bootstrap_server", "msgspec", "numpy", "te"},
    "kvstore/client": {"bootstrap_server", "msgspec", "numpy", "te", "zmq"},
    "kvstore/host": {"msgspec", "numpy", "te"},
    "kvstore/lmcache": {"lmcache", "msgspec", "numpy", "te"},
    "kvstore/membership": {"bootstrap_server", "msgspec", "redis"},
    "kvstore/memory": set(),
    "kvstore/metrics": {"aiohttp", "bootstrap_server", "te"},
    "kvstore/objects": {"msgspec", "numpy", "te", "xxhash"},
    "kvstore/owner": {"bootstrap_server", "msgspec", "numpy", "te", "zmq"},
    "kvstore/protocol": {"bootstrap_server", "msgspec", "numpy", "te", "zmq"},
    "kvstore/rules": {"numpy"},
    "kvstore/tiers": {"numpy", "obstore", "xxhash"},
    # Of these, what is installed.
    # The router's choice, which is pure, is simulated, too.
    "kvstore_tools": {"kvstore", "mooncake", "msgspec", "numpy", "redis", "sglang_mooncake", "te"},
    "sglang_mooncake": {"bootstrap_server", "msgspec", "numpy", "te", "zmq"},
    "sglang_mooncake/faces": {"bootstrap_server"},
    "sglang_mooncake/faces/mooncake_engine": {"bootstrap_server", "te"},
    "sglang_mooncake/faces/mooncake_store": {"kvstore", "numpy", "te"},
    "sglang_mooncake/faces/nixl": {"bootstrap_server", "msgspec", "numpy", "te"},
    "sglang_mooncake/router": {
        "aiohappyeyeballs",
        "aiohttp",
        "bootstrap_server",
        "jinja2",
        "kvstore",
        "msgspec",
        "numpy",
        "te",
        "tokenizers",
        "uvloop",
        "zmq",
    },
    SGLANGS: {
        "bootstrap_server",
        "huggingface_hub",
        "kvstore",
        "msgspec",
        "numpy",
        "opentelemetry",
        "prometheus_client",
        "sglang",
        "te",
        "torch",
    },
    VLLMS: {"bootstrap_server", "huggingface_hub", "kvstore", "numpy", "te", "torch", "vllm"},
}
#: Module → what it imports only where there is a checkout, and does without elsewhere.
FOUND_IN_A_CHECKOUT = {"te/cli.py": {"te_bench"}, "kvstore/cli.py": {"kvstore_tools"}}
#: Folder → why its files name variables of SGLang.
VARIABLES_OF_SGLANG = {
    SGLANGS: "is made for it",
    "bootstrap_server": "refuses pairs of SGLang's servers, and says which setting to change",
}


def modules(package: str) -> Iterator[tuple[str, str]]:
    """Each module's path and text."""
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def imports(source: str) -> set[str]:
    """What a module imports, wherever in it, by an import statement or by a call with the name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), level=0, names=names):
                found |= {f"{module}.{one.name}" for one in names}
            case ast.Import(names=names):
                found |= {one.name for one in names}
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called),
                args=[ast.Constant(value=str(name)), *_],
            ) if called in ("import_module", "__import__", "of_checkout"):
                found.add(name)
    return found


def refused(module: str, source: str) -> set[str]:
    """What the module imports although its folder may not."""
    folder = max((one for one in ALLOWED if module.startswith(f"{one}/")), key=len)
    own = folder.partition("/")[0]
    may = ALLOWED[folder] | {own} | set(sys.stdlib_module_names)
    may |= FOUND_IN_A_CHECKOUT.get(module, set())
    found = {name for name in imports(source) if name.partition(".")[0] not in may}
    for engine in (SGLANGS, VLLMS):
        if folder != engine:
            inside = engine.replace("/", ".") + "."
            found |= {name for name in imports(source) if f"{name}.".startswith(inside)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_what_their_folder_may(package: str) -> None:
    found = {
        module: sorted(more)
        for module, source in modules(package)
        if (more := refused(module, source))
    }
    assert not found, "imports that are not allowed there (ALLOWED in this file)"


@pytest.mark.parametrize(
    "statement",
    [
        "import sglang",
        "from sglang.srt import utils",
        "import torch.cuda as cuda",
        "from sglang_mooncake import sglang",
        "from sglang_mooncake.sglang.seam import rank_context",
        "import vllm",
        "from sglang_mooncake.vllm import facts",
        "importlib.import_module('sglang.srt')",
        "__import__('torch')",
    ],
)
def test_an_import_that_comes_late_is_seen(statement: str) -> None:
    source = f"import importlib\ndef late():\n    if True:\n        {statement}\n"
    assert refused("sglang_mooncake/rooms/decode.py", source)
    folder = VLLMS if "vllm" in statement else SGLANGS
    assert not refused(f"{folder}/seam.py", source)


@pytest.mark.parametrize("package", PACKAGES)
def test_variables_of_sglang_are_named_where_sglang_is_known(package: str) -> None:
    found = {
        module: sorted(set(names))
        for module, source in modules(package)
        if (names := re.findall("SGLANG_[A-Z0-9_]*", source))
        and not any(module.startswith(f"{folder}/") for folder in VARIABLES_OF_SGLANG)
    }
    assert not found, "names of SGLang's variables; hand them in (context.SettingNames)"
