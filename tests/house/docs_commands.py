# SPDX-License-Identifier: Apache-2.0
"""The commands of README.md and docs/, as they stand there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = [
    "MANIFESTS",
    "ROOT",
    "UNITS",
    "Command",
    "blocks",
    "commands",
    "containers",
    "launched",
    "manifest_commands",
    "pages",
    "program",
    "split",
    "unit_commands",
]

ROOT = Path(__file__).parents[2]
#: Of systemd.
UNITS = sorted((ROOT / "docs").rglob("*.service"))
#: Of Kubernetes.
MANIFESTS = sorted((ROOT / "docs").rglob("*.yaml"))
_FENCE = re.compile(r"^```([\w-]*)[^\n]*\n(.*?)^```[^\n]*$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:(?<=\n\n)|\A)((?: {4}[^\n]*\n)+)")
_PROMPT = re.compile(r"^(?:[\w-]+)?[$#] ")
_ASSIGNMENT = re.compile(r"[A-Z][A-Z0-9_]*=.*", re.DOTALL)
#: What begins a command in an indented block; other such blocks are output or drawings.
PROGRAMS = frozenset(
    {
        *("apt-get", "curl", "docker", "ip", "kubectl", "kvstore", "lmcache", "mlnx_qos"),
        *("modprobe", "pip", "python"),
        *("python3", "sglang", "sglang-mooncake", "ssh", "sysctl", "te", "ulimit", "vllm"),
    }
)


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    page: str
    #: Names of the variables before it.
    variables: tuple[str, ...]
    words: tuple[str, ...]
    #: All commands of one block have its number.
    block: int

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"[:150]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> Iterator[Block]:
    """Every code block; one that is indented has the language `indented`."""
    for path in pages():
        text, page = path.read_text(), path.relative_to(ROOT).as_posix()
        for language, body in _FENCE.findall(text):
            yield Block(page, language, body)
        for body in _INDENTED.findall(_FENCE.sub("", text)):
            yield Block(page, "indented", re.sub("^ {4}", "", body, flags=re.MULTILINE))


def commands() -> list[Command]:
    """The commands of all blocks of shell, and of those indented ones that begin with a program."""
    found: list[Command] = []
    for number, block in enumerate(blocks()):
        lines = block.text.splitlines()
        prompted = [_PROMPT.sub("", line) for line in lines if _PROMPT.match(line)]
        if prompted:
            lines = prompted
        elif block.language == "indented":
            first = next(iter(split(lines)), ((), ()))[1]
            if not first or not _is_program(program(first)):
                continue
        elif block.language not in ("sh", "bash", "console", "shell"):
            continue
        found += [Command(block.page, *one, number) for one in split(lines)]
    return found


def containers(tree: Any) -> Iterator[dict[str, Any]]:
    """Those of a manifest, at any depth."""
    if isinstance(tree, dict):
        if "image" in tree and "name" in tree:
            yield tree
        for value in tree.values():
            yield from containers(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from containers(value)


def launched(container: dict[str, Any]) -> tuple[str, ...]:
    """The words that a container's shell ends in, with values for what Kubernetes fills in."""
    assert container["command"] == ["/bin/sh", "-c"]
    script = re.sub(r"\$\(?\w+_INDEX\)?", "0", container["args"][0])
    script = re.sub(r"\$\(?\w+\)?", "10.0.0.1", script)
    ((_, words),) = split([script])
    assert words[0] == "exec"
    return words[1:]


def unit_commands() -> list[Command]:
    """What systemd starts, of all unit files."""
    found = []
    for path in UNITS:
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ExecStart=(.+)$", text, re.MULTILINE):
            ((_, words),) = split([line])
            found.append(Command(path.relative_to(ROOT).as_posix(), (), words, -1))
    return found


def manifest_commands() -> list[Command]:
    """Those of all containers of all manifests."""
    return [
        Command(path.relative_to(ROOT).as_posix(), (), launched(container), -1)
        for path in MANIFESTS
        for container in containers(list(yaml.safe_load_all(path.read_text())))
    ]


def split(lines: Sequence[str]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Variables and words of each command; one may go over lines, or be a part of a pipe."""
    open_text = ""
    for line in lines:
        open_text += line + "\n"
        if line.endswith("\\"):
            continue
        try:
            lexer = shlex.shlex(
                open_text.replace("\\\n", " "), posix=True, punctuation_chars="|&;>"
            )
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # a quotation that goes on
            continue
        open_text = ""
        while words:
            end = next((i for i, word in enumerate(words) if set(word) <= set("|&;>")), len(words))
            redirects = words[end : end + 1] == [">"]
            part, words = words[:end], words[end + 1 + redirects :]
            count = next((i for i, w in enumerate(part) if not _ASSIGNMENT.fullmatch(w)), len(part))
            if count < len(part):
                variables = tuple(word.partition("=")[0] for word in part[:count])
                yield variables, tuple(part[count:])


def program(words: Sequence[str]) -> str:
    """What runs: `te` for `.venv/bin/te`, `scripts/demo` as it is."""
    first = words[0]
    return first.rpartition("/")[2] if "/bin/" in first else first


def _is_program(name: str) -> bool:
    return name in PROGRAMS or name.startswith("scripts/")
