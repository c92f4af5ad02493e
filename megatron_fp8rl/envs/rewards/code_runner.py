"""Runs a program and its tests inside the sandbox. ``programs.py`` passes this file's text to Python.

Imports the standard library only. Reads one JSON request from standard input and prints one line: the request's secret
and a JSON reply. Tests have their own namespace and built-ins, and the modules that they use are restored before each
statement. So a program that replaces ``abs`` or ``math.isclose`` changes no test. A value that equals every object
fails the comparison.
"""

import ast
import builtins
import importlib
import json
import os
import sys
import types
from typing import Any

_OPERATORS = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__")
_COUNTED, _CHECKED = "_counted_", "_checked_"


class _Tests(ast.NodeTransformer):
    """Counts the assertions that run, checks compared values, and removes calls of ``unittest.main``."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        node.test = _call(_COUNTED, node.test)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        node.left = _call(_CHECKED, node.left)
        node.comparators = [_call(_CHECKED, operand) for operand in node.comparators]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if not name.lower().startswith(("assert", "raises")):
            return node
        starred = any(isinstance(arg, ast.Starred) for arg in node.args)
        node.args = node.args if starred else [_call(_CHECKED, arg) for arg in node.args]
        return _call(_COUNTED, node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        value = node.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) in ("unittest.main", "pytest.main"):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)


def _call(name: str, argument: ast.expr) -> ast.expr:
    call = ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=[argument], keywords=[])
    return ast.fix_missing_locations(ast.copy_location(call, argument))


def _checked(value: Any) -> Any:
    """The value. Raises TypeError if it, or a part of it, equals or orders itself with every object."""
    waiting, seen = [value], 0
    while waiting and seen < 10_000:
        item, seen = waiting.pop(), seen + 1
        if isinstance(item, (list, tuple, set, frozenset)):
            waiting.extend(list(item))
        elif isinstance(item, dict):
            waiting.extend([*item, *item.values()])
        for name in _OPERATORS:
            method = getattr(type(item), name, None)
            if isinstance(method, types.FunctionType) and _accepts(method, item):
                raise TypeError(f"{type(item).__name__}.{name} is true for every object")
    return value


def _accepts(method: types.FunctionType, item: Any) -> bool:
    try:
        answer = method(item, object())
        return answer is not NotImplemented and bool(answer)
    except Exception:
        return False


class _Modules:
    """The modules that tests use, as they were before the program ran; ``sys``, which tests may change, is not kept."""

    def __init__(self, texts: list[str]):
        nodes = [node for text in texts for node in ast.walk(_parsed(text))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        bases = {node.value for node in nodes if isinstance(node, ast.Attribute)}
        names |= {base.id for base in bases if isinstance(base, ast.Name)} & sys.stdlib_module_names
        names |= {"unittest"} if any("unittest" in text for text in texts) else set()
        names -= {"solution", "sys", "__main__"}
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:
                continue
        roots = {name.partition(".")[0] for name in names}
        loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in roots}
        self._modules = {name: module for name, module in loaded.items() if type(module) is types.ModuleType}
        self._contents = [(module, dict(vars(module))) for module in self._modules.values()]
        values = {id(value): value for _, content in self._contents for value in content.values()}.values()
        classes = [value for value in values if isinstance(value, type) and value.__module__ in self._modules]
        self._classes = [(value, dict(vars(value))) for value in classes]

    def restore(self) -> None:
        sys.modules.update(self._modules)
        for module, content in self._contents:
            module.__class__ = types.ModuleType
            vars(module).update(content)
        for value, content in self._classes:
            for name, part in content.items():
                if vars(value).get(name) is not part:
                    setattr(value, name, part)


def _parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SyntaxError:  # reported when it runs
        return ast.Pass()


def main() -> None:
    run, dumps = exec, json.dumps
    originals = dict(vars(builtins))
    request = json.loads(sys.stdin.buffer.read())
    reply = os.fdopen(os.dup(1), "w")
    modules = _Modules([request["setup"], *request["statements"]])
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    num_asserted = 0

    def counted(value: Any) -> Any:
        nonlocal num_asserted
        num_asserted += 1
        return value

    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    names = module.__dict__
    answer: dict[str, Any] = {"passed": [], "results": [], "missing": ""}

    def attempt(action) -> bool:
        try:
            action()
        except BaseException as error:
            trace = error.__traceback__
            while trace and trace.tb_next:
                trace = trace.tb_next
            if isinstance(error, ModuleNotFoundError) and trace.tb_frame.f_code.co_filename in ("setup.py", "test.py"):
                answer["missing"] = error.name
            return False
        return True

    def start() -> None:
        run(compile(request["setup"], "setup.py", "exec", dont_inherit=True), names)
        for name in request["names"]:
            names.pop(name, None)  # the program has to define it
        run(compile(request["program"], "answer.py", "exec", dont_inherit=True), names)
        if not any(name in names for name in request["names"]):
            raise NameError(f"the program defines none of {request['names']}")

    def result(call: list[Any]) -> None:
        function = names.get(request["function"])
        if function is None:
            function = getattr(names["Solution"](), request["function"])
        answer["results"].append([dumps(function(*call))])

    if attempt(start):
        visible = {name for name in names if not name.startswith("__")}
        visible -= {name for name in originals if name not in request["names"]}
        tests = types.ModuleType("__main__")
        sys.modules["__main__"] = tests
        scope = tests.__dict__
        scope |= {name: names[name] for name in visible} | {"__builtins__": originals}
        scope |= {_COUNTED: counted, _CHECKED: _checked}
        modules.restore()
        if attempt(lambda: run(compile(request["setup"], "setup.py", "exec", dont_inherit=True), scope)):
            for statement in request["statements"]:
                modules.restore()
                tree = _Tests().visit(ast.parse(statement))
                answer["passed"].append(
                    attempt(lambda tree=tree: run(compile(tree, "test.py", "exec", dont_inherit=True), scope))
                )
        for call in request["calls"]:
            if not attempt(lambda call=call: result(call)):
                answer["results"].append([])
    answer["num_asserted"] = num_asserted
    reply.write(f"\n{request['secret']} {dumps(answer)}\n")
    reply.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
