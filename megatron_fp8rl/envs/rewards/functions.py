"""Reward functions of a user: ``FILE.py:function(prompt, completion, **row)``.

The file is loaded by its path, so it needs no package and no PYTHONPATH. A function gets what it names: ``prompt``,
``completion``, ``answer``, and the other columns of the row; with ``**row``, all of them. One that takes ``prompts``
and ``completions`` is called with lists of one. It returns a number or a dict of numbers, and may be a coroutine.
"""

from __future__ import annotations

import ast
import asyncio
import difflib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_fp8rl.types import Prompt


class RewardError(ValueError):
    """A reward that cannot be built; the message names the file, the function or the option."""


COPIES = "MEGATRON_FP8RL_OWN_FILES"  # environment variable: folder with copies of files, by their absolute paths


def parse(spec: str) -> tuple[Path, str]:
    """(file, function) of ``FILE.py:function``; in a queued job the copy of the file."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    copy = Path(os.environ.get(COPIES, "")) / str(path.absolute()).lstrip("/")
    return (copy if os.environ.get(COPIES) and copy.is_file() else path), name


def problem(spec: str) -> str:
    """Why the function cannot be used, found without running the file; empty if nothing is wrong."""
    path, name = parse(spec)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path(".")
        near = difflib.get_close_matches(path.name, [file.name for file in folder.glob("*.py")], n=3, cutoff=0.5)
        return f"{path} does not exist" + (f"; did you mean {' or '.join(near)}?" if near else "")
    try:
        tree = ast.parse(path.read_text(), filename=str(path))
    except SyntaxError as error:
        return f"{path}, line {error.lineno}: {error.msg}"
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    imported = [
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    ]
    if name in names or name in imported:
        return ""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; it has {', '.join(names) or 'none'}"
    return f"{path} has no function {name!r}{hint}"


def load(spec: str, options: Mapping[str, Any]) -> Callable[[Prompt, str], Any]:
    """The function as ``(prompt, completion) -> number or dict``. ``options`` are further arguments.

    Raises RewardError.
    """
    if found := problem(spec):
        raise RewardError(found)
    path, name = parse(spec)
    loaded = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(loaded)
    try:
        loaded.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name)
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    is_batch = "completions" in parameters

    def call(prompt: Prompt, completion: str) -> Any:
        row = {**prompt.metadata, **options, "answer": prompt.answer}
        row |= {"prompt": prompt.text, "completion": completion, "prompts": [prompt.text], "completions": [completion]}
        if takes_all:
            hidden = ("prompt", "completion") if is_batch else ("prompts", "completions")
            given = {key: value for key, value in row.items() if key not in hidden}
        else:
            given = {key: row[key] for key in parameters if key in row}
        value = function(**given)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return value[0] if is_batch else value

    return call


async def _awaited(value: Any) -> Any:
    return await value
