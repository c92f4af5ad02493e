"""Tools for agents: a calculator, and Python in a sandbox.

In: text from the policy. Out: a short result or an error text; tools never raise for bad input. Runs in agent workers.
"""

import ast
import asyncio
import operator
import sys
from collections.abc import Callable
from typing import Any

from megatron_fp8rl.envs import sandbox

_MAX_CHARACTERS = 4000  # per result
_MAX_DIGITS = 200
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression with + - * / // % and parentheses; return "error: ..." for other text."""
    if len(expression) > _MAX_DIGITS:
        return f"error: the expression has {len(expression)} characters, more than {_MAX_DIGITS}"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return shorten(str(int(value) if isinstance(value, float) and value.is_integer() else value))
    except (SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError) as error:
        return f"error: {error}"


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / // % and parentheses")


async def python(program: str, *, deadline_s: float = 10.0, limits: sandbox.Limits | None = None) -> str:
    """Run a program in the sandbox (no network, no files); return its output and, if it failed, the reason."""
    arguments = [sys.executable, "-I", "-c", program]
    result = await asyncio.to_thread(sandbox.run, arguments, deadline_s=deadline_s, limits=limits)
    return shorten(result.stdout + (f"error: {result.reason}" if result.reason else ""))


def shorten(text: str) -> str:
    """Keep only the beginning and the end of a long text."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    half = _MAX_CHARACTERS // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
