"""The reward ``code``: run the program of a completion against the tests of its row, in a sandbox.

``code_blocks.py`` finds the program, ``code_tests.py`` reads the tests, and ``code_runner.py`` runs both.
"""

import json
import math
import secrets
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.envs.rewards.code_blocks import blocks, compiles, defined_names, parsed, program_in
from megatron_fp8rl.envs.rewards.code_tests import CodeTests, asserts, raises, tests_of
from megatron_fp8rl.envs.rewards.extraction import after_reasoning
from megatron_fp8rl.types import Prompt

_RUNNER = Path(__file__).with_name("code_runner.py").read_text()
_PYTHON = (sys.executable, "-I", "-X", "int_max_str_digits=0", "-c")
_LONGEST_PROGRAM = 100_000  # bytes; Linux limits an argument to 128 KiB


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
    sys.set_int_max_str_digits(0)  # rows and programs may have longer integers
    limits = sandbox.Limits(memory_bytes=memory_bytes, cpu_s=max(1, round(case_deadline_s) + 1))

    def score(prompt: Prompt, completion: str) -> float:
        needed = tests_of(prompt, tests).first(max_tests)
        program = _program(completion, needed)
        if program is None:
            return 0.0
        if needed.cases and not needed.function:
            passed = [_prints(program, *case, case_deadline_s, limits) for case in needed.cases]
        else:
            passed = _in_one_process(program, needed, case_deadline_s, limits)
        return float(all(passed)) if all_or_nothing else sum(passed) / len(passed)

    return score


def _program(completion: str, tests: CodeTests) -> str | None:
    program = program_in(completion, tests.names)
    text = after_reasoning(completion)
    if tests.header and not (program and defined_names(program) & tests.names):
        body = program if blocks(text) else text
        program = _continued(tests.header, body or "") or program
    if program is None or parsed(program) is None or len(program.encode()) > _LONGEST_PROGRAM:
        return None  # not Python, which includes a null character and characters that are not Unicode
    return program


def _continued(header: str, body: str) -> str | None:
    """The function of the prompt with a body, whose indentation may be missing; None if that is not Python."""
    bodies = (body, f"    {body}", textwrap.indent(textwrap.dedent(body), "    ")) if body.strip() else ()
    return next((header + text for text in bodies if compiles(header + text)), None)


def _in_one_process(program: str, tests: CodeTests, deadline_s: float, limits: sandbox.Limits) -> list[bool]:
    """Whether each statement or call is right. Raises ValueError if statements pass without an assertion."""
    secret = secrets.token_hex(16)
    request = {
        "program": program,
        "setup": tests.setup,
        "statements": tests.statements,
        "function": tests.function,
        "calls": [arguments for arguments, _ in tests.cases],
        "names": sorted(tests.names),
        "secret": secret,
    }
    text = json.dumps(request)
    result = sandbox.run([*_PYTHON, _RUNNER], stdin=text, deadline_s=deadline_s, limits=limits)
    printed, _, answer = (result.stdout.splitlines() or [""])[-1].partition(" ")
    if printed != secret or result.status != 0:
        return [False] * (len(tests.cases) or len(tests.statements))
    reply = json.loads(answer)
    if reply["missing"]:
        raise ValueError(f"the tests import {reply['missing']!r}, which {sys.executable} does not have; install it")
    if tests.cases:
        pairs = zip(reply["results"] or [[]] * len(tests.cases), tests.cases, strict=True)
        return [any(_is_equal(json.loads(text), value) for text in texts for value in case[1]) for texts, case in pairs]
    passed = reply["passed"] or [False] * len(tests.statements)
    if all(passed) and not reply["num_asserted"] and not any(map(raises, tests.statements)):
        raise ValueError(f"the tests ran no assertion: {tests.statements[0][:80]!r}")
    # A statement without an assertion, such as an import, earns nothing; if it fails, the program fails.
    required = [done for done, statement in zip(passed, tests.statements, strict=True) if asserts(statement)]
    return required if all(passed) or not all(required) else [*required, False]


def _prints(program: str, stdin: str, stdout: str, deadline_s: float, limits: sandbox.Limits) -> bool:
    result = sandbox.run([*_PYTHON, program], stdin=stdin, deadline_s=deadline_s, limits=limits)
    actual, expected = result.stdout.split(), stdout.split()
    is_long = len(actual) == len(expected)
    return result.status == 0 and is_long and all(map(_is_equal_text, actual, expected))


def _is_equal_text(actual: str, expected: str) -> bool:
    """Whether a printed part is equal; for a decimal fraction, within the precision of a float."""
    if actual == expected or not any(mark in expected.lower() for mark in ".e"):
        return actual == expected
    try:
        return _is_close(float(actual), float(expected))
    except ValueError:
        return False


def _is_equal(actual: Any, expected: Any) -> bool:
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_is_equal, actual, expected))
    if isinstance(actual, dict) and isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_is_equal(actual[key], expected[key]) for key in expected)
    if (
        isinstance(actual, (int, float))
        and isinstance(expected, (int, float))
        and float in map(type, (actual, expected))
    ):
        return _is_close(actual, expected)
    return actual == expected


def _is_close(actual: float, expected: float) -> bool:
    """Relative tolerance 1e-6 below 1, absolute above; never less than the rounding of large floats."""
    if not (math.isfinite(actual) and math.isfinite(expected)):
        return actual == expected
    size = abs(expected)
    tolerance = max(1e-6 * min(1.0, size), 1e-12 * size) if size else 1e-9
    return abs(actual - expected) <= tolerance
