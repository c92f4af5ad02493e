"""Read the tests of a row. Pure.

Statements (MBPP, HumanEval, EvalPlus, KodCode, BigCodeBench): text or a list of text. Functions ``check(candidate)``
and ``test_...()`` and classes of unittest that no statement calls are called. ``test_imports`` and ``test_setup_code``
run first.

Cases (APPS, TACO, CodeContests, LiveCodeBench): ``{"inputs": [...], "outputs": [...]}`` or a list of ``{"input": ...,
"output": ...}``. With the name of a function (``fn_name``), an input is a list of arguments; without, it is standard
input.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import functools
import io
import json
import pickle
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_fp8rl.envs.rewards.code_blocks import parsed, used_names
from megatron_fp8rl.types import Prompt

COLUMNS = (
    *("tests", "test_list", "test_cases", "input_output", "public_test_cases", "public_tests", "official_tests"),
    *("verification_info", "unit_tests", "test_code", "test"),
    *("private_tests", "private_test_cases", "generated_tests"),
)
# Columns with more cases of a row: of CodeContests, and of LiveCodeBench.
_MORE = {"public_tests": ("private_tests", "generated_tests"), "public_test_cases": ("private_test_cases",)}
_PACKED = re.compile(r"e[AFJN][A-Za-z0-9+/=\s]{20,}")  # base64 of what zlib has compressed
_LARGEST_BYTES = 1 << 28  # of unpacked tests
_SETUP_COLUMNS = ("test_imports", "test_setup_code")
_INPUTS, _OUTPUTS = ("inputs", "input", "stdin"), ("outputs", "output", "expected_output", "expected", "stdout")
_FUNCTION_NAMES = ("fn_name", "func_name", "function_name")
_CALLED = re.compile(r"(check|test)", re.IGNORECASE)
# Sites with problems of this kind import these names before the program.
_FUNCTION_SETUP = """
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys
from typing import *
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, nlargest, nsmallest
from itertools import accumulate, combinations, permutations, product
from bisect import bisect_left, bisect_right, insort
from math import ceil, comb, factorial, floor, gcd, inf, sqrt
"""


@dataclass(frozen=True, kw_only=True)
class CodeTests:
    """The tests of one row: statements, calls of a function, or standard input and output."""

    statements: tuple[str, ...] = ()
    setup: str = ""  # runs before the program and before the statements
    header: str = ""  # code of the prompt that a completion without a function continues, as in HumanEval
    function: str = ""  # name of the function that the cases call; empty: cases are standard input
    cases: tuple[tuple[Any, Any], ...] = ()  # (input or arguments, output or result)
    names: frozenset[str] = frozenset()  # names that the program has to define

    def first(self, count: int) -> CodeTests:
        """At most ``count`` cases or statements; statements without an assertion stay."""
        if self.cases:
            return CodeTests(**{**vars(self), "cases": self.cases[:count]})
        kept, left = [], count
        for statement in self.statements:
            left -= asserts(statement)
            if left >= 0:
                kept.append(statement)
        return CodeTests(**{**vars(self), "statements": tuple(kept)})


def tests_of(prompt: Prompt, column: str = "") -> CodeTests:
    """The tests of a row. ``column``: "" searches in COLUMNS, then in the answer. Raises ValueError if there are none,
    if they cannot be read, or if they assert nothing."""
    row = prompt.metadata
    names = [column] if column else [name for name in COLUMNS if _is_set(row.get(name))][:1]
    names += [name for name in _MORE.get("".join(names), ()) if _is_set(row.get(name)) and not column]
    where = f"{prompt.prompt_id}: the tests in {' and '.join(map(repr, names)) or 'the answer'}"
    try:
        values = [_unpacked(_decoded(_lookup(row, name))) for name in names]
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None
    values = list(filter(_is_set, values or [_decoded(row.get("full_answer", prompt.answer))]))
    if not values:
        raise ValueError(
            f"{prompt.prompt_id} has no tests in {' or '.join(names or COLUMNS)}; name their column by options.tests"
        )
    try:
        return _all_cases(values, row) if any(map(_has_cases, values)) else _statements(values[0], prompt)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def _statements(value: Any, prompt: Prompt) -> CodeTests:
    statements = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    if not statements or not all(isinstance(statement, str) for statement in statements):
        raise ValueError(f"are neither Python statements nor inputs and outputs: {str(value)[:80]!r}")
    trees = [parsed(statement) for statement in statements]
    if None in trees:
        raise ValueError(f"are not Python: {statements[trees.index(None)][:80]!r}")
    whole = ast.Module(body=[node for tree in trees for node in tree.body], type_ignores=[])
    row = prompt.metadata
    entry_point = str(row.get("entry_point") or "")
    loaded = {node.id for node in ast.walk(whole) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for index, tree in enumerate(trees):
        calls = "".join(_call(node, entry_point) for node in tree.body if getattr(node, "name", None) not in loaded)
        statements[index] += f"\n{calls}" if calls else ""
    if not any(map(asserts, statements)):
        raise ValueError(f"assert nothing, so every program would pass: {statements[0][:80]!r}")
    setup = "\n".join(_lines(row.get(name)) for name in _SETUP_COLUMNS)
    names = frozenset(re.findall(r"[^\W\d]\w*", entry_point))
    header = _header(prompt, entry_point) if entry_point.isidentifier() else ""
    if entry_point:
        setup += "\n" + _without(header or str(row.get("prompt") or ""), names)
    return CodeTests(
        statements=tuple(statements), setup=setup, header=header, names=names or _names_of_program(whole, setup)
    )


def _call(node: ast.stmt, entry_point: str) -> str:
    """The statement that runs a test which only defines; empty if the node is none. Raises ValueError."""
    if isinstance(node, ast.ClassDef) and any("TestCase" in ast.unparse(base) for base in node.bases):
        loaded = f"__import__('unittest').defaultTestLoader.loadTestsFromTestCase({node.name})"
        result = f"__import__('unittest').TextTestRunner().run({loaded})"
        return f"assert (lambda result: result.wasSuccessful() and result.testsRun)({result})\n"
    if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
        methods = [
            part.name for part in node.body if isinstance(part, ast.FunctionDef) and part.name.startswith("test")
        ]
        return "".join(f"{node.name}().{name}()\n" for name in methods)
    if not isinstance(node, ast.FunctionDef) or not _CALLED.match(node.name):
        return ""
    needed = len(node.args.posonlyargs) + len(node.args.args) - len(node.args.defaults)
    if needed == 0:
        return f"{node.name}()\n"
    if needed == 1 and entry_point:
        return f"{node.name}({entry_point})\n"
    if needed == 1:
        raise ValueError(f"define {node.name}() and do not call it; name the tested function in the column entry_point")
    raise ValueError(f"define {node.name}() with {needed} arguments and do not call it; add the call")


def asserts(statement: str) -> bool:
    """Whether a statement has an assertion, raises an error, or calls a function that may."""
    tree = parsed(statement)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, (ast.Assert, ast.Raise)):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name.lower().startswith(("assert", "raises")) or _CALLED.match(name):
                return True
    return False


def raises(statement: str) -> bool:
    """Whether a statement raises an error by itself, which :func:`tests_of` accepts in place of an assertion."""
    tree = parsed(statement)
    return tree is not None and any(isinstance(node, ast.Raise) for node in ast.walk(tree))


def _names_of_program(tests: ast.Module, setup: str) -> frozenset[str]:
    """Names that the tests use and nobody but the program defines; built-ins only if there is no other name."""
    imported = {
        alias.name
        for node in ast.walk(tests)
        if isinstance(node, ast.ImportFrom) and node.module == "solution"
        for alias in node.names
    }
    setup_tree = parsed(setup)
    whole = ast.Module(body=[*(setup_tree.body if setup_tree else ()), *tests.body], type_ignores=[])
    free, known_to_nobody = used_names(whole)
    return frozenset(imported | known_to_nobody or free)


def _header(prompt: Prompt, entry_point: str) -> str:
    """The code in the prompt that ends with the tested function's head and docstring; empty if there is none."""
    question = prompt.messages[-1]["content"] if prompt.messages else prompt.text
    for text in (str(prompt.metadata.get("prompt") or ""), question):
        lines = text.splitlines()
        heads = [i for i, line in enumerate(lines) if re.match(rf"(?:async )?def {entry_point}\b", line)]
        if not heads:
            continue
        starts = [i for i in range(heads[0] + 1) if re.match(r"(?:async def|def|class|import|from|@)\b", lines[i])]
        ends = range(len(lines), heads[0], -1)
        for code in ("\n".join(lines[start:end]) for start in starts for end in ends):
            if parsed(code) is not None:
                return code + "\n"
    return ""


def _without(code: str, names: Collection[str]) -> str:
    """Code without the functions and classes of these names; empty if it is not Python."""
    tree = parsed(code)
    kept = [node for node in tree.body if getattr(node, "name", "") not in names] if tree else []
    return ast.unparse(ast.Module(body=kept, type_ignores=[]))


def _has_cases(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, (list, tuple)) and bool(value) and all(isinstance(case, Mapping) for case in value)
    )


def _all_cases(values: Sequence[Any], row: Mapping[str, Any]) -> CodeTests:
    """The cases of all columns, in their order."""
    if other := [value for value in values if not _has_cases(value)]:
        raise ValueError(f"are not all inputs and outputs: {str(other[0])[:60]!r}; write them as JSON")
    filled = [value for value in values if not isinstance(value, Mapping) or any(value.values())]
    read = [_cases(value, row) for value in filled or values[:1]]
    if len(functions := {tests.function for tests in read}) > 1:
        raise ValueError(f"call several functions: {', '.join(sorted(functions))}")
    return replace(read[0], cases=tuple(case for tests in read for case in tests.cases))


def _unpacked(value: Any) -> Any:
    """The tests of LiveCodeBench's text in base64, which is compressed, pickled JSON; other values unchanged."""
    return _unpacked_text(value) if isinstance(value, str) and _PACKED.fullmatch(value) else value


@functools.lru_cache(maxsize=8)
def _unpacked_text(text: str) -> Any:
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(base64.b64decode(text), _LARGEST_BYTES)
        if unpacking.unconsumed_tail:
            raise ValueError(f"unpack to more than {_LARGEST_BYTES >> 20} MiB")
        tests = _Texts(io.BytesIO(data)).load() if data[:1] == b"\x80" else data.decode()
        return json.loads(tests) if isinstance(tests, str) else tests
    except (zlib.error, pickle.UnpicklingError, EOFError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"are packed and cannot be read: {error}; unpack them to JSON") from None


class _Texts(pickle.Unpickler):
    """Reads texts, numbers and lists; anything else could run code."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"they use {module_name}.{global_name}")


def _cases(value: Any, row: Mapping[str, Any]) -> CodeTests:
    while isinstance(value, Mapping) and "test_cases" in value:
        row, value = {**row, **value}, _decoded(value["test_cases"])
    pairs: list[tuple[Any, Any, Mapping[str, Any]]] = []
    for part in [value] if isinstance(value, Mapping) else value:
        inputs, outputs = _first(part, _INPUTS), _first(part, _OUTPUTS)
        if inputs is None or outputs is None:
            raise ValueError(f"have no inputs and outputs (keys: {', '.join(map(str, part)) or 'none'})")
        if isinstance(value, Mapping):
            inputs, outputs = _list(inputs), _list(outputs)
            if len(inputs) != len(outputs):
                raise ValueError(f"have {len(inputs)} inputs and {len(outputs)} outputs")
            pairs += [(given, expected, part) for given, expected in zip(inputs, outputs, strict=True)]
        else:
            pairs.append((inputs, outputs, part))
    if not pairs:
        raise ValueError("have no inputs and outputs")
    functions = {_function_name(part, row) for _, _, part in pairs}
    if len(functions) > 1:
        raise ValueError(f"call several functions: {', '.join(sorted(map(str, functions)))}")
    function = functions.pop()
    if not function:
        texts = tuple((_text(given), _text(expected)) for given, expected, _ in pairs)
        if not any(expected.strip() for _, expected in texts):
            raise ValueError("expect no output, so every program would pass")
        return CodeTests(cases=texts)
    calls = tuple(_arguments_and_result(given, expected, function) for given, expected, _ in pairs)
    wraps = all(isinstance(expected, list) and len(expected) == 1 for _, expected in calls)
    accepted = tuple((given, [expected, expected[0]] if wraps else [expected]) for given, expected in calls)
    return CodeTests(setup=_FUNCTION_SETUP, function=function, cases=accepted, names=frozenset({function, "Solution"}))


def _function_name(part: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if part.get("testtype") == "stdin" or part.get("type") == "stdin_stdout":
        return ""
    for place in (part, _decoded(part.get("metadata")), row, _decoded(row.get("metadata"))):
        name = _first(place, _FUNCTION_NAMES) if isinstance(place, Mapping) else None
        if name:
            return str(name)
    if part.get("testtype") == "functional" or part.get("type") == "function_call":
        raise ValueError("call a function without a name; name it in the column fn_name")
    return ""


def _arguments_and_result(given: Any, expected: Any, function: str) -> tuple[list[Any], Any]:
    if isinstance(given, str):  # LiveCodeBench: one JSON value per line
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()], _decoded(expected, always=True)
        except ValueError:
            pass
    if not isinstance(given, list):
        raise ValueError(f"call {function} with {str(given)[:60]}, which is no list of arguments")
    return given, expected


def _decoded(value: Any, always: bool = False) -> Any:
    """The value of JSON text or of a Python literal; other values, and text that is neither, unchanged."""
    if not isinstance(value, str) or not (always or value.strip()[:1] in ("[", "{", '"')):
        return value
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value.strip())
    return value


def _first(values: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _lookup(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _is_set(value: Any) -> bool:
    return bool(value.strip()) if isinstance(value, str) else bool(value)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _lines(value: Any) -> str:
    value = _decoded(value)
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
