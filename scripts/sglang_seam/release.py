# SPDX-License-Identifier: Apache-2.0
"""A release of SGLang as files: what it has of what is used, and how that looks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from sglang_seam.uses import Use

__all__ = ["Release", "changes"]

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
#: Where the members of what SGLang's accessors return are declared: settings are made from
#: arguments, by name, so that a name anywhere here may be one.
_SETTINGS = ("runtime_context.py", "server_args.py", "environ.py", "arg_groups")


class Release:
    """The folder that holds `sglang/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[Path, ast.Module] = {}

    def lacks(self, use: Use) -> str | None:
        """What of it is missing, in words; None if all is there."""
        if not use.name:
            return self._lacks_path(use.module)
        found = self.find(use.module, use.name)
        if found is None:
            return f"no {use.module}.{use.name}"
        if use.member and not self._has_member(found, use):
            return f"no {use}"
        if use.parameters and isinstance(found, ast.FunctionDef | ast.ClassDef):
            known = self._parameters(found)
            lacking = [one for one in use.parameters if known is not None and one not in known]
            if lacking:
                return f"{use.module}.{use.name} has no parameter {', '.join(lacking)}"
        return None

    def shape(self, use: Use) -> str:
        """Whatever of its definition can change what it means; empty if it has no definition."""
        found = self.find(use.module, use.name)
        if isinstance(found, ast.ClassDef) and use.member:
            inside = [one for one in found.body if getattr(one, "name", None) == use.member]
            return "".join(ast.unparse(_bare(one)) for one in inside)
        if isinstance(found, ast.ClassDef):  # its members are uses of their own
            return ", ".join(ast.unparse(base) for base in found.bases)
        return ast.unparse(_bare(found)) if isinstance(found, _Definition) else ""

    def find(self, module: str, name: str, depth: int = 8) -> ast.AST | None:
        """The definition of a module's name, wherever it comes from."""
        path = self._file(module)
        if path is None or not depth:
            return None
        for node in ast.walk(self._tree(path)):
            match node:
                case ast.FunctionDef(name=own) | ast.ClassDef(name=own) if own == name:
                    return node
                case ast.Assign(targets=targets) if name in _assigned(targets):
                    return node
                case ast.AnnAssign(target=ast.Name(id=own)) if own == name:
                    return node
                case ast.ImportFrom(module=str(other), names=names, level=0):
                    if any(name in (one.asname or one.name, "*") for one in names):
                        actual = next(
                            (one.name for one in names if (one.asname or one.name) == name), name
                        )
                        return self.find(other, actual, depth - 1) or node
                    if any(one.name == "*" for one in names):
                        found = self.find(other, name, depth - 1)
                        if found is not None:
                            return found
        is_module = self._file(f"{module}.{name}") is not None
        return self._tree(path) if is_module else None

    def _lacks_path(self, dotted: str) -> str | None:
        module, _, name = dotted.rpartition(".")
        is_there = self._file(dotted) is not None or (
            self._file(module) is not None and self.find(module, name) is not None
        )
        return None if is_there else f"no {dotted}"

    def _has_member(self, found: ast.AST, use: Use) -> bool:
        if use.is_called or use.name == "envs":
            return use.member in self._words() | _words(ast.unparse(found))
        if isinstance(found, ast.ClassDef):
            return use.member in self._members(found)
        return True  # a module, or a value: nobody can tell

    def _members(self, made: ast.ClassDef) -> set[str]:
        """Of the class and of its bases, and what any method sets on itself."""
        names = set()
        for node in ast.walk(made):
            match node:
                case ast.FunctionDef(name=name):
                    names.add(name)
                case ast.Assign(targets=targets):
                    names |= _assigned(targets)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    names.add(name)
        for base in made.bases:
            if isinstance(base, ast.Name):
                for path, tree in list(self._trees.items()):
                    if any(node is made for node in ast.walk(tree)):
                        found = self.find(self._module(path), base.id)
                        if isinstance(found, ast.ClassDef) and found is not made:
                            names |= self._members(found)
        return names

    def _parameters(self, found: ast.FunctionDef | ast.ClassDef) -> set[str] | None:
        """None if it takes whatever it is given, or nobody can tell."""
        made: ast.AST = found
        if isinstance(found, ast.ClassDef):
            inits = [one for one in found.body if getattr(one, "name", "") == "__init__"]
            if not inits:
                return None
            made = inits[0]
        assert isinstance(made, ast.FunctionDef)
        given = made.args
        if given.kwarg is not None:
            return None
        return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}

    @cache  # noqa: B019 - a release lives as long as the program
    def _words(self) -> set[str]:
        found: set[str] = set()
        for name in _SETTINGS:
            path = self._folder / "sglang/srt" / name
            for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
                found |= _words(file.read_text())
        return found

    def _file(self, module: str) -> Path | None:
        path = self._folder.joinpath(*module.split("."))
        candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
        return next((one for one in candidates if one.is_file()), None)

    def _module(self, path: Path) -> str:
        dotted = path.relative_to(self._folder).with_suffix("").as_posix().replace("/", ".")
        return dotted.removesuffix(".__init__")

    def _tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(path.read_text())
        return self._trees[path]


def changes(known: Release, new: Release, used: set[Use]) -> Iterator[str]:
    """What a release lacks that the known one has, and what has changed, in lines."""
    said = set()
    for use in sorted(used):
        lacking = new.lacks(use)
        if lacking is not None:
            line = lacking if known.lacks(use) is None else ""
        else:
            before, after = known.shape(use), new.shape(use)
            has_changed = bool(before and after and before != after)
            name = str(Use(use.module, use.name, use.member, use.is_called))
            line = f"{name} reads otherwise" if has_changed else ""
        if line and line not in said:
            said.add(line)
            yield line


def _assigned(targets: list[ast.expr]) -> set[str]:
    return {one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)}


def _bare(node: ast.AST) -> ast.AST:
    """The definition without its docstring."""
    body = getattr(node, "body", [])
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        copy = ast.parse(ast.unparse(node)).body[0]
        copy.body = copy.body[1:] or [ast.Pass()]  # type: ignore[attr-defined]
        return copy
    return node


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
