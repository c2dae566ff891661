"""Source metrics: the program that runs in a jail and counts nodes of a syntax tree. Standard library
only."""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import sys
import types
from collections.abc import Iterator

BRANCHES = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.IfExp, ast.ExceptHandler, ast.match_case, ast.Assert,
)  # fmt: skip
BLOCKS = (
    ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match,
)  # fmt: skip
WIDTH = 100
"""characters of a statement that count as one line"""

RUNNING = frozenset(
    ("exec", "eval", "compile", "__import__", "breakpoint", "__builtins__", "__loader__", "__spec__")
)
"""builtin names that run text as code, or lead to such a function"""
REACHING = frozenset(("globals", "locals", "vars"))
_MODULES = """
_ctypes _imp _interpreters _xxsubinterpreters antigravity bdb builtins cProfile code codeop
concurrent.interpreters ctypes doctest ensurepip gc idlelib imp importlib inspect lib2to3 marshal
multiprocessing pdb pickle pickletools pkgutil profile pty pydoc runpy shelve site sqlite3 subprocess
symtable test this timeit tkinter trace turtle turtledemo types unittest venv xmlrpc zipimport zipapp
"""
MODULES = frozenset(_MODULES.split())
"""modules that run text or bytes as code, create code objects, or lead to such functions"""
_OS = """
system popen execl execle execlp execlpe execv execve execvp execvpe posix_spawn posix_spawnp spawnl
spawnle spawnlp spawnlpe spawnv spawnve spawnvp spawnvpe
"""
_SYS = """
modules _getframe _current_frames meta_path path_hooks path path_importer_cache settrace setprofile
addaudithook call_tracing last_traceback monitoring
"""
OF_MODULES = {
    "os": frozenset(_OS.split()), "sys": frozenset(_SYS.split()),
    "typing": frozenset(("get_type_hints", "ForwardRef")), "ast": frozenset(("parse",)),
}  # fmt: skip
TYPES = frozenset(("MappingProxyType", "SimpleNamespace", "NoneType", "GenericAlias", "UnionType"))
_ATTRIBUTES = """
__builtins__ __globals__ __code__ __closure__ __subclasses__ __base__ __bases__ __mro__ __loader__ __spec__
__import__ __getattribute__ __reduce__ __reduce_ex__ __annotations__ __defaults__ __kwdefaults__ __self__
f_globals f_locals f_builtins f_back tb_frame gi_frame gi_code cr_frame cr_code ag_frame ag_code co_code
import_module exec_module load_module find_spec FunctionType CodeType LambdaType
"""
ATTRIBUTES = frozenset(_ATTRIBUTES.split())
"""attributes that lead from an object to code, or create it"""
ASKING = frozenset(("getattr", "setattr", "attrgetter", "methodcaller"))


def docstrings(tree: ast.AST) -> set[int]:
    """Statements that are docstrings, by their position."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            match node.body[0]:
                case ast.Expr(ast.Constant(str())) as first:
                    found.add(id(first))
    return found


def branches(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, BRANCHES))


def nesting(tree: ast.AST) -> int:
    """Blocks around the innermost statement; `elif` is no deeper than its `if`. A definition starts at depth
    0, except inside a block, where it counts as any other statement."""
    deepest, pending = 0, [(tree, 0)]
    while pending:
        node, depth = pending.pop()
        deepest = max(deepest, depth)
        for child in ast.iter_child_nodes(node):
            chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
            within = depth if chained else depth + isinstance(child, BLOCKS)
            pending.append((child, within))
    return deepest


def statements(tree: ast.AST, strings: set[int]) -> int:
    """Number of statements; an assignment inside an expression counts as one."""
    counted = (ast.stmt, ast.NamedExpr, ast.Lambda)
    return sum(isinstance(node, counted) and id(node) not in strings for node in ast.walk(tree))


def lines(tree: ast.AST, strings: set[int]) -> int:
    """Lines of the statements, each laid out by `ast.unparse`, independent of the layout in the source."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, _HELD) and id(node) not in strings:
            head = [ast.unparse(part) for part in ast.iter_child_nodes(node) if isinstance(part, _PARTS)]
            total += max(1, -(-sum(map(len, head)) // WIDTH)) + len(getattr(node, "decorator_list", ()))
    return total


_HELD = (ast.stmt, ast.ExceptHandler, ast.match_case)
_PARTS = (ast.expr, ast.arguments, ast.alias, ast.keyword, ast.withitem, ast.pattern)


# ---------------------------------------------------------------------------------- code that is hidden


def hidden(tree: ast.AST) -> Iterator[str]:
    """Number of ways to run text or bytes as code, or to reach such a function, after resolving names."""
    modules = dict(imported(tree))
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bound |= {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from forbidden_import(node)
        elif isinstance(node, ast.Name) and node.id not in bound:
            if node.id in RUNNING or node.id in REACHING:
                yield node.id
        elif isinstance(node, ast.Attribute):
            if node.attr in ATTRIBUTES:
                yield node.attr
            elif (module := module_of(node.value, modules)) is not None:
                yield from of_module(module, node.attr)
        elif isinstance(node, ast.Call):
            yield from getattr_calls(node, modules)


def module_of(node: ast.expr, modules: dict[str, str]) -> str | None:
    """The module that an expression refers to, also through the imports of other modules."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and (outer := module_of(node.value, modules)) is not None:
        value = found(outer, node.attr)
        return value.__name__ if isinstance(value, types.ModuleType) else None
    return None


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Name -> module that it refers to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if isinstance(found(node.module, alias.name), types.ModuleType):
                    yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def forbidden_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if running(alias.name))
    elif node.module and not node.level:
        plain = node.module == "types" and all(alias.name in TYPES for alias in node.names)
        if running(node.module) and not plain:
            yield node.module
        for alias in node.names:
            yield from of_module(node.module, alias.name)


def running(module: str) -> bool:
    return module in MODULES or module.partition(".")[0] in MODULES


def of_module(module: str, name: str) -> Iterator[str]:
    """Whether an attribute of a module runs code, under whatever name."""
    if running(module):
        if module != "types" or name not in TYPES:
            yield f"{module}.{name}"
        return
    if name in OF_MODULES.get(module, ()):
        yield f"{module}.{name}"
        return
    value = found(module, name)
    runs = value is not None and any(value is getattr(builtins, each, None) for each in RUNNING)
    if runs or (isinstance(value, types.ModuleType) and running(value.__name__)):
        yield f"{module}.{name}"


def found(module: str, name: str) -> object:
    """An attribute of a module of the standard library."""
    if module.partition(".")[0] not in sys.stdlib_module_names or running(module):
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def getattr_calls(node: ast.Call, modules: dict[str, str]) -> Iterator[str]:
    """getattr and the like: a forbidden attribute name, or a computed one on a module."""
    name = getattr(node.func, "id", getattr(node.func, "attr", None))
    if name not in ASKING:
        return
    owner = module_of(node.args[0], modules) if node.args else None
    for each in node.args:
        text = each.value if isinstance(each, ast.Constant) else None
        if isinstance(text, str):
            yield from (f"{name} of {part}" for part in text.split(".") if part in ATTRIBUTES | RUNNING)
            yield from of_module(owner, text) if owner is not None else ()
        elif owner is not None and each is not node.args[0]:
            yield f"{name} of {owner}"


def measured(texts: dict[str, str]) -> dict[str, int] | None:
    """The metrics; None if a text is not valid Python."""
    total = {"statements": 0, "branches": 0, "nesting": 0, "lines": 0, "hidden": 0}
    for text in texts.values():
        try:
            # as bytes, since the source may declare its encoding
            tree = ast.parse(text.encode("utf-8", "surrogateescape"))
            strings = docstrings(tree)
            total["statements"] += statements(tree, strings)
            total["branches"] += sum(map(branches, ast.walk(tree)))
            total["nesting"] = max(total["nesting"], nesting(tree))
            total["lines"] += lines(tree, strings)
            total["hidden"] += sum(1 for _ in hidden(tree))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
    return total


if __name__ == "__main__":
    print(json.dumps(measured(json.load(sys.stdin))))
