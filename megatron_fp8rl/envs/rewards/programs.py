"""The reward ``code``: run the last fenced block of a completion against the tests of its row, in a sandbox.

In: a completion and the tests in a column of its row. Out: the fraction of passed tests, or all-or-nothing 1 or 0.
Tests are Python statements (``assert f(2) == 4``) as a list or text, as in MBPP, or input and output pairs, as in APPS:
``{"inputs": [...], "outputs": [...]}`` or a list of ``{"input": ..., "output": ...}``.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from typing import Any

from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.types import Prompt

_BLOCK = re.compile(r"```[ \t]*(?:python|py)?[^\n]*\n(.*?)```", re.DOTALL)
_COLUMNS = ("tests", "test_list", "test_cases", "input_output", "test")

# Reads the program from standard input, not from a file, and prints a secret that the program cannot know.
_HARNESS = """
import contextlib, io, json, sys
given = json.loads(sys.stdin.read())
passed, names = 0, {"__name__": "__main__"}
with contextlib.redirect_stdout(io.StringIO()):
    try:
        exec(compile(given["program"], "answer.py", "exec"), names)
        for test in given["tests"]:
            try:
                exec(compile(test, "test.py", "exec"), names)
                passed += 1
            except BaseException:
                pass
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
print(given["word"], passed)
"""


def code(
    *,
    tests: str = "",
    all_or_nothing: bool = True,
    max_tests: int = 16,
    case_deadline_s: float = 6.0,
    memory_bytes: int = 1 << 30,
) -> Callable[[Prompt, str], float]:
    """``tests``: column name; "" searches. ``case_deadline_s``: limit for all statements, or for one input case."""
    sandbox.require()
    limits = sandbox.Limits(memory_bytes=memory_bytes, cpu_s=max(1, round(case_deadline_s) + 1))

    def score(prompt: Prompt, completion: str) -> float:
        statements, cases = tests_of(prompt, tests)
        program = program_in(completion)
        if program is None:
            return 0.0
        if cases:
            cases = cases[:max_tests]
            passed = sum(_passes(program, given, wanted, case_deadline_s, limits) for given, wanted in cases)
        else:
            statements = statements[:max_tests]
            passed = _num_true(program, statements, case_deadline_s, limits)
        num_tests = len(cases) or len(statements)
        return float(passed == num_tests) if all_or_nothing else passed / num_tests

    return score


def program_in(completion: str) -> str | None:
    """The last fenced block after the reasoning; None if there is none."""
    blocks = _BLOCK.findall(completion.rpartition("</think>")[2])
    return blocks[-1] if blocks else None


def tests_of(prompt: Prompt, column: str = "") -> tuple[list[str], list[tuple[str, str]]]:
    """(statements, cases of input and output) of a row. Raises ValueError if it has neither."""
    names = [column] if column else [name for name in _COLUMNS if prompt.metadata.get(name)]
    value = prompt.metadata.get(names[0]) if names else prompt.answer
    if isinstance(value, str) and value.strip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, Mapping) and "inputs" in value:
        return [], [
            (_text(given), _text(wanted)) for given, wanted in zip(value["inputs"], value["outputs"], strict=True)
        ]
    if isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        return [], [(_text(one["input"]), _text(one["output"])) for one in value]
    if isinstance(value, list) and value:
        return [str(one) for one in value], []
    if isinstance(value, str) and value.strip():
        return [value], []
    raise ValueError(
        f"{prompt.prompt_id} has no tests in {' or '.join(names or _COLUMNS)}; name their column by options.tests"
    )


def _num_true(program: str, statements: list[str], deadline_s: float, limits: sandbox.Limits) -> int:
    word = secrets.token_hex(16)
    given = json.dumps({"program": program, "tests": statements, "word": word})
    found = sandbox.run([sys.executable, "-I", "-c", _HARNESS], stdin=given, deadline_s=deadline_s, limits=limits)
    said, _, passed = (found.stdout.splitlines() or [""])[-1].partition(" ")
    return int(passed) if said == word and found.status == 0 else 0


def _passes(program: str, given: str, wanted: str, deadline_s: float, limits: sandbox.Limits) -> bool:
    found = sandbox.run([sys.executable, "-I", "-c", program], stdin=given, deadline_s=deadline_s, limits=limits)
    return found.status == 0 and found.stdout.split() == wanted.split()


def _text(value: Any) -> str:
    return (
        value
        if isinstance(value, str)
        else "\n".join(map(str, value))
        if isinstance(value, list)
        else json.dumps(value)
    )
