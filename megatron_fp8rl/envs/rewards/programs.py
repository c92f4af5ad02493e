"""The reward ``code``: run the last fenced block of a completion against the tests of its row, in a sandbox.

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
request = json.loads(sys.stdin.read())
passed, names = 0, {"__name__": "__main__"}
with contextlib.redirect_stdout(io.StringIO()):
    try:
        exec(compile(request["program"], "answer.py", "exec"), names)
        for test in request["tests"]:
            try:
                exec(compile(test, "test.py", "exec"), names)
                passed += 1
            except BaseException:
                pass
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
print(request["secret"], passed)
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
            passed = sum(_passes(program, stdin, stdout, case_deadline_s, limits) for stdin, stdout in cases)
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
        return [], list(zip(map(_text, value["inputs"]), map(_text, value["outputs"]), strict=True))
    if isinstance(value, list) and value and all(isinstance(case, Mapping) for case in value):
        return [], [(_text(case["input"]), _text(case["output"])) for case in value]
    if isinstance(value, list) and value:
        return list(map(str, value)), []
    if isinstance(value, str) and value.strip():
        return [value], []
    raise ValueError(
        f"{prompt.prompt_id} has no tests in {' or '.join(names or _COLUMNS)}; name their column by options.tests"
    )


def _num_true(program: str, statements: list[str], deadline_s: float, limits: sandbox.Limits) -> int:
    secret = secrets.token_hex(16)
    request = json.dumps({"program": program, "tests": statements, "secret": secret})
    result = sandbox.run([sys.executable, "-I", "-c", _HARNESS], stdin=request, deadline_s=deadline_s, limits=limits)
    printed, _, passed = (result.stdout.splitlines() or [""])[-1].partition(" ")
    return int(passed) if printed == secret and result.status == 0 else 0


def _passes(program: str, stdin: str, stdout: str, deadline_s: float, limits: sandbox.Limits) -> bool:
    result = sandbox.run([sys.executable, "-I", "-c", program], stdin=stdin, deadline_s=deadline_s, limits=limits)
    return result.status == 0 and result.stdout.split() == stdout.split()


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
