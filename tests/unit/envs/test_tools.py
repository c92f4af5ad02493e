"""Tools never raise for what a policy writes, and return what fits into a conversation."""

import asyncio

import pytest

from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.envs.tools import calculate, python, shorten


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("1 + 2 * 3", "7"),
        ("(1+2)*3", "9"),
        ("-7 // 2", "-4"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("2 - -3", "5"),
        ("1/0", "error: division by zero"),
        ("__import__('os')", "error: only numbers"),
        ("9**9**9", "error: only"),
        ("", "error: invalid syntax"),
        ("1" * 300, "error: the expression has 300 characters"),
        ("1\0", "error: "),
        ("True", "error: only numbers"),
        ("1e999 * 0", "nan"),
        ("(" * 150, "error: "),
    ],
)
def test_the_calculator(expression, result):
    assert calculate(expression).startswith(result)


def test_long_results_keep_both_ends():
    assert shorten("ab") == "ab"
    text = shorten("a" * 10**7 + "end")
    assert (
        text.startswith("aaa") and text.endswith("end") and "9996003 characters left out" in text and len(text) < 4100
    )


@pytest.mark.skipif(bool(sandbox.problem()), reason=sandbox.problem())
def test_python_in_the_sandbox():
    assert asyncio.run(python("print(2 + 3)")) == "5\n"
    assert "ZeroDivisionError" in asyncio.run(python("1/0"))
    assert asyncio.run(python("while True: pass", deadline_s=0.5)) == "error: it did not end before its deadline"
    assert "unreachable" in asyncio.run(python('import socket; socket.create_connection(("192.0.2.1", 9), 1)'))
