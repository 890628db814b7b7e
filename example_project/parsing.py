"""Definitions of a module, from its syntax tree."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

# Warnings about invalid escapes in parsed files. ast.parse calls each file "<unknown>".
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")
warnings.filterwarnings("ignore", category=DeprecationWarning, module="<unknown>")

KINDS = {
    ast.Module: "module",
    ast.ClassDef: "class",
    ast.FunctionDef: "function",
    ast.AsyncFunctionDef: "coroutine",
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """A module, class or function in a file."""

    kind: str
    name: str
    qualified_name: str
    line: int
    docstring: str


def definitions(source: bytes, module: str) -> list[Found]:
    """Return the definitions in a module's source, by line; the module itself comes first.

    Raises SyntaxError for invalid source, and ValueError for NUL bytes.
    """
    tree = ast.parse(source)
    inner = sorted(_walk(tree, module), key=lambda found: found.line)
    return [_found(tree, module.rpartition(".")[2], module), *inner]


def _walk(tree: ast.AST, prefix: str) -> Iterator[Found]:
    # An explicit stack: the library's tests nest deeper than Python's recursion limit.
    waiting = [(tree, prefix)]
    while waiting:
        parent, prefix = waiting.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                name = f"{prefix}.{node.name}"
                yield _found(node, node.name, name)
                waiting.append(
                    (node, name if isinstance(node, ast.ClassDef) else f"{name}.<locals>")
                )
            elif isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
                waiting.append((node, prefix))


def _found(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
    name: str,
    qualified_name: str,
) -> Found:
    return Found(
        kind=KINDS[type(node)],
        name=storable(name),
        qualified_name=storable(qualified_name),
        line=getattr(node, "lineno", 1),
        docstring=storable(ast.get_docstring(node) or ""),
    )


def storable(text: str) -> str:
    """Replace NUL characters and lone surrogates, which some databases refuse."""
    return text.replace("\x00", "\ufffd").encode(errors="backslashreplace").decode()
