# SPDX-License-Identifier: Apache-2.0
"""What our code uses of SGLang, read from its syntax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Use", "uses"]

_DOTTED = re.compile(r"sglang(\.\w+)+")
#: Our description of SGLang's `KVArgs`: a class whose fields we read of another.
_LIKE = {"KVArgsLike": ("sglang.srt.disaggregation.base.conn", "KVArgs")}


@dataclass(frozen=True, order=True)
class Use:
    """Something of a module of SGLang's.

    name: defined there; empty for the module itself.
    member: of the name, or of what calling it returns (`is_called`); empty for the name itself.
    parameters: that calls of ours name.
    """

    module: str
    name: str = ""
    member: str = ""
    is_called: bool = False
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        called = "()" if self.is_called else ""
        member = f".{self.member}" if self.member else ""
        given = f"({', '.join(f'{name}=' for name in self.parameters)})" if self.parameters else ""
        return f"{self.module}.{self.name}".rstrip(".") + called + member + given


def uses(sources: Iterable[str]) -> set[Use]:
    """Of all modules together."""
    found: set[Use] = set()
    for source in sources:
        tree = ast.parse(source)
        imported = dict(_imported(tree))
        found |= {Use(*where) for where in imported.values()}
        found |= set(_of_names(tree, imported))
        found |= set(_named_in_text(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name in _LIKE:
                fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
                names = [one.id for one in fields if isinstance(one, ast.Name)]
                found |= {Use(*_LIKE[node.name], name) for name in names}
    return found


def _imported(tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
    """Name in our module → module and name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            for one in node.names:
                yield one.asname or one.name, (str(node.module), one.name)


def _of_names(tree: ast.AST, imported: dict[str, tuple[str, str]]) -> Iterator[Use]:
    """Members and parameters of what is imported, and members of what its calls return."""
    for scope in _scopes(tree):
        returned = dict(_returned(scope, imported))
        for node in ast.walk(scope):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=member) if name in imported:
                    yield Use(*imported[name], member)
                case ast.Attribute(value=ast.Name(id=name), attr=member) if name in returned:
                    yield Use(*returned[name], member, is_called=True)
                case ast.Attribute(value=ast.Call(func=ast.Name(id=name)), attr=member) if (
                    name in imported
                ):
                    yield Use(*imported[name], member, is_called=True)
                case ast.Call(func=ast.Name(id=name), keywords=given) if name in imported and given:
                    names = tuple(sorted(one.arg for one in given if one.arg))
                    yield Use(*imported[name], parameters=names)


def _scopes(tree: ast.AST) -> Iterator[ast.AST]:
    yield from (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.Lambda))


def _returned(
    scope: ast.AST, imported: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, tuple[str, str]]]:
    """Variables that hold what an imported function returned."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        pairs = zip(target.elts, value.elts, strict=True) if both else [(target, value)]  # type: ignore[attr-defined]
        for name, made in pairs:
            match name, made:
                case ast.Name(id=variable), ast.Call(func=ast.Name(id=called)) if (
                    called in imported
                ):
                    yield variable, imported[called]


def _named_in_text(tree: ast.AST) -> Iterator[Use]:
    """Texts such as "sglang.srt.plugins", and calls with a module's and a name's text, as tables of
    what is hooked have them."""
    for node in ast.walk(tree):
        texts = [one.value for one in _texts(node)]
        for at, text in enumerate(texts):
            if _DOTTED.fullmatch(text):
                after = texts[at + 1 : at + 3]
                dotted = ".".join(after[:2]) if isinstance(node, ast.Tuple) else "".join(after[:1])
                name, _, member = dotted.partition(".")
                yield Use(text, name, member) if name.isidentifier() else Use(text)


def _texts(node: ast.AST) -> list[ast.Constant]:
    inside: list[ast.expr] = []
    if isinstance(node, ast.Tuple):
        inside = node.elts
    elif isinstance(node, ast.Call):
        inside = node.args
    elif isinstance(node, ast.Assign):
        inside = [node.value]
    return [one for one in inside if isinstance(one, ast.Constant) and isinstance(one.value, str)]
