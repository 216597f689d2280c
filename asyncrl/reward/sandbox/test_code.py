"""Finds what a test needs from the program, by the test's source, outside the sandbox.

`examine` returns the names that the judge requests from the program: names that the test uses, does not bind itself, and that are
not built in. A test that needs an unsupported feature (docs/rewards.md lists them) is refused with its line before any program is
judged: otherwise a right program would fail it, or a wrong one would pass.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import symtable
import sys
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

_BUILT_IN = frozenset(dir(builtins))
_EVALUATES = frozenset({"eval", "exec", "compile", "__import__", "globals", "locals"})
_COMPARISONS = frozenset({"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"})
"""For two values that cannot be compared, these methods do not return False."""
_LOOKS_INSIDE = frozenset({"vars", "dir", "id"})
_OWN_PROCESSES = frozenset({"multiprocessing", "ProcessPoolExecutor", "fork"})
_LOADS_OBJECTS = frozenset({"pickle", "marshal", "shelve", "ctypes", "importlib", "inspect", "gc", "types", "dataclasses"})


_MODULE_NAMES = """bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator re
    statistics string"""
_MODULES = frozenset(_MODULE_NAMES.split())
"""If a test uses only attributes of one of these modules and does not import it, the judge's own module is used."""
_HELPER_NAMES = """Counter OrderedDict defaultdict deque namedtuple ChainMap Fraction Decimal datetime date timedelta deepcopy
    reduce partial permutations combinations combinations_with_replacement product accumulate islice zip_longest sqrt isqrt fabs
    floor ceil trunc fsum prod hypot pi tau inf nan gcd lcm factorial comb perm exp log log2 log10 sin cos tan asin acos atan
    atan2 sinh cosh tanh degrees radians chain starmap groupby pairwise heappush heappop heapify nlargest nsmallest bisect_left
    bisect_right insort mean median stdev random randint randrange uniform choice shuffle sample os sys time"""
_HELPERS = frozenset(_HELPER_NAMES.split())
"""Standard library names that a test may use without import, and that a program could define so that the test passes."""
_JUDGES = re.compile(
    r"self|assert.*|unittest|TestCase|(is|all)_?close|approx|((array|almost|approx(imately)?|nearly)_?)+equal|pytest|np|numpy|torch|pd|pandas",
    re.IGNORECASE,
)
"""Names that tests use to compare; if the program defined them, it would decide the verdict."""
_UNUSABLE = {
    "redirect_stderr": "; of what the program prints, only standard output reaches the test",
    "assertSetEqual": ", which hands the program the expected set; write assertEqual",
}


class Needs(NamedTuple):
    """Names that the judge requests from a program before it runs a test."""

    names: tuple[str, ...]
    """All requested names, attributes of the module `solution` included."""
    global_names: tuple[str, ...]
    """Requested names that become globals of the test."""
    test_functions: tuple[str, ...]
    """Functions `test_...` without arguments that the test does not call: the judge calls them, as pytest would."""
    modules: tuple[str, ...]
    """Standard library modules that the test uses without import: a program's own `math.isclose` could always return True."""


class UnusableTest(Exception):  # noqa: N818 - of the data, told as such
    """The test cannot be judged here; the message begins with its line."""


@lru_cache(maxsize=4096)
def examine(code: str) -> Needs:
    """Return the names that a test needs.

    Raises:
        UnusableTest: It is not Python, uses nothing of the program, or needs a feature that handles or the sandbox lack.
    """
    try:
        tree = ast.parse(code)
        own = _names_of_others(code, tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableTest(f"line {getattr(error, 'lineno', None) or 1}: is not Python: {error}") from error
    from_solution, as_solution = _imports_of_solution(tree)
    global_names = {name for name in own if name not in _BUILT_IN and not name.startswith("__")}
    bare = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=part) if name in _MODULES:
                bare[name] -= hasattr(importlib.import_module(name), part)
    modules = {name for name in global_names & _MODULES if not bare[name]}
    global_names -= modules
    names = global_names | {name for name in from_solution if not name.startswith("__")}
    if not names:
        raise UnusableTest("line 1: uses nothing of the program, so every program would pass")
    rooted = names | as_solution
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    caught = {each.id for handler in handlers if handler.type for each in ast.walk(handler.type) if isinstance(each, ast.Name)}
    caught.update(handler.name for handler in handlers if handler.name)
    for node in ast.walk(tree):
        if complaint := _complaint(node, rooted, functions) or _type_complaint(node, rooted, caught):
            raise UnusableTest(f"line {node.lineno}: {complaint}")  # type: ignore[attr-defined]
    _refuse_helpers(tree, global_names, rooted)
    return Needs(tuple(sorted(names)), tuple(sorted(global_names)), _test_functions(tree, rooted), tuple(sorted(modules)))


def _refuse_helpers(tree: ast.Module, global_names: set[str], rooted: set[str]) -> None:
    """Refuse a name that a test uses to judge the program and does not import or define.

    A standard library name is allowed in a statement with no other name of the program, and in a call without arguments: `sqrt`
    and `Counter` may be the program's.
    """
    judges = {name for name in global_names if _JUDGES.fullmatch(name) and len(rooted) > 1}
    own = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    helpers = global_names & _HELPERS if rooted - _HELPERS - own else set[str]()
    alone = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Compare, ast.Assert, ast.Expr)):
            names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in rooted]
            alone.update(names if len({name.id for name in names}) == 1 else ())
        elif isinstance(node, ast.Call) and not node.args and not node.keywords:
            alone.add(node.func)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and (node.id in judges or (node.id in helpers and node not in alone)):
            raise UnusableTest(
                f"line {node.lineno}: uses {node.id}, which it does not import or define; the program's own could decide the "
                "verdict (import or define it, or take it from solution)"
            )


def _names_of_others(code: str, tree: ast.Module) -> set[str]:
    """Return the names that a module uses without binding them, or before it binds them."""
    module = symtable.symtable(code, "<test>", "exec")
    used, tables = set[str](), [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used.update(
            symbol.get_name() for symbol in table.get_symbols()
            if symbol.is_referenced() and (table is module or symbol.is_global())
        )  # fmt: skip
    bound = {
        symbol.get_name() for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }  # fmt: skip
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    first_store: dict[str, int] = {}
    for node in names:
        if not isinstance(node.ctx, ast.Load):
            first_store[node.id] = min(first_store.get(node.id, node.lineno), node.lineno)
    # In `f = wrap(f)` the right side is evaluated first.
    early = {node.id for node in names if isinstance(node.ctx, ast.Load) and node.lineno <= first_store.get(node.id, 0)}
    return (used - bound) | (used & early)


def _imports_of_solution(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names imported from the module `solution`, and the names bound to the module."""
    taken, modules = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "solution" and not node.level:
            taken.update(alias.name for alias in node.names if alias.name != "*")
        elif isinstance(node, ast.Import):
            modules.update(alias.asname or alias.name for alias in node.names if alias.name == "solution")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            taken.add(node.attr)
    return taken, modules


def _complaint(node: ast.AST, rooted: set[str], functions: set[str]) -> str:
    """Return the fault of one node of a test that defines these functions; empty if there is none."""
    said = ""
    match node:
        case ast.ClassDef():
            said = (
                f"defines class {node.name}; classes and objects of a test cannot be handed to the program or raised in "
                "it (raise a built-in error there), and unittest classes are not run"
            )
        case ast.AsyncFor() | ast.AsyncWith():
            said = "uses async for or async with; of a program's object only `await` works"
        case ast.FunctionDef() | ast.AsyncFunctionDef() if any(_root(each) in rooted for each in node.decorator_list):
            said = f"decorates {node.name} with a function of the program, which may call it only while it is being passed"
        case ast.Attribute(attr=name) if name in _COMPARISONS or (name.startswith("__") and _root(node.value) in rooted):
            said = f"reads {name} of a program's object"
        case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()) if _root(node) in {"sys", "os", "builtins"}:
            place = ast.unparse(node)
            said = "" if place == "sys.stdout" else f"sets {place}, which changes the judge and not the program"
        case ast.Name(id=name) if name in _EVALUATES:
            said = f"uses {name}, which would let the program's text run in the judge"
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _OWN_PROCESSES and _root(node) not in rooted:
            said = f"uses {name}; a process of the test's own cannot use the program's objects, threads can"
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _UNUSABLE:
            said = f"uses {name}{_UNUSABLE[name]}"
        case ast.Call(func=ast.Name(id=name), args=args) if name in _LOOKS_INSIDE and any(_root(each) in rooted for each in args):
            said = f"calls {name}() of a program's object"
        case ast.Call(func=ast.Call(func=function, args=args)) if _root(function) in rooted and any(
            isinstance(each, ast.Lambda) or (isinstance(each, ast.Name) and each.id in functions) for each in args
        ):
            said = "calls what came of a function of the test, which the program may call only while it is being passed"
        case ast.Call(args=[ast.Constant(value="sys.stdout"), *_]):
            pass
        case ast.Call(func=function) if "patch" in ast.unparse(function).split(".") and _root(function) not in rooted:
            said = "patches something other than sys.stdout, which changes the judge and not the program"
        case ast.Import() | ast.ImportFrom():
            said = _import_complaint(node)
    return said


def _type_complaint(node: ast.AST, rooted: set[str], caught: set[str]) -> str:
    """Return the fault of a comparison of a type with a class of the program; comparisons with error classes are allowed.

    `caught` has the names of the errors that the test catches, and of their classes.
    """
    match node:
        case ast.Compare(left=left, comparators=others):
            operands = [left, *others]
        case ast.Call(func=ast.Attribute(attr=method), args=args) if method.startswith("assert") and "Instance" not in method:
            operands = args[:2]
        case _:
            return ""
    types = [each for each in operands if not isinstance(each, ast.Name) and _root(each) == "type"]
    of_what = {ast.unparse(part.args[0]) for each in types for part in ast.walk(each) if isinstance(part, ast.Call) and part.args}
    if of_what <= caught:
        return ""
    others = [each for each in operands if each not in types]
    for part in (part for each in others for part in (each.elts if isinstance(each, (ast.Tuple, ast.List, ast.Set)) else [each])):
        match part:
            case ast.Name() | ast.Attribute():
                names = ast.unparse(part).removesuffix(".__name__").split(".")
                name, is_known = names[-1], names[0] not in rooted
            case ast.Constant(value=str(name)):
                is_known = name in _BUILT_IN | _HELPERS | {"NoneType"}
            case _:
                continue
        if not is_known and name not in caught and not name.endswith(("Error", "Exception")):
            return f"compares a type with {name}; objects of the program's have another type in a test; write isinstance"
    return ""


def _import_complaint(node: ast.Import | ast.ImportFrom) -> str:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for module in (name.split(".")[0] for name in modules):
        if module in _LOADS_OBJECTS:
            return f"imports {module}, which reaches past the values that the program returns"
        if module in _OWN_PROCESSES:
            return f"imports {module}; a process of the test's own cannot use the program's objects, threads can"
        if module != "solution" and module not in sys.stdlib_module_names:
            return f"imports {module}, which is not in the standard library; the sandbox has nothing else"
    return ""


def _root(node: ast.AST) -> str:
    """Return the first name of an expression of attributes, items and calls; empty without one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.Await)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _test_functions(tree: ast.Module, rooted: set[str]) -> tuple[str, ...]:
    """Return the test functions that the judge calls; refuse an uncalled function that checks or uses something."""
    functions = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    asked = rooted | {function.name for function in functions}
    tests: list[str] = []
    for function in functions:
        inside = set(ast.walk(function))
        if any(isinstance(node, ast.Name) and node.id == function.name and node not in inside for node in ast.walk(tree)):
            continue
        arguments = function.args
        num_needed = (
            len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults) + arguments.kw_defaults.count(None)
        )
        if function.name.startswith("test") and num_needed == 0:
            tests.append(function.name)
        elif any(isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and _root(node) in asked) for node in inside):
            raise UnusableTest(f"line {function.lineno}: {function.name} is never called, so what it checks is never checked")
    return tuple(tests)
