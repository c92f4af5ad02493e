"""User reward functions: ``FILE.py:function(prompt, completion, **row)``.

The file is loaded by path, without a package or PYTHONPATH. A function gets the arguments that it names: ``prompt``,
``completion``, ``answer`` and other columns of the row; with ``**row``, all columns. It returns a number or a dict of
numbers, and may be a coroutine. A function with a ``completions`` parameter is batched: ``prompts``, ``completions``,
``answer`` and columns are lists of equal length, and it returns a list.
"""

import ast
import asyncio
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_fp8rl.algo.near_matches import near_matches
from megatron_fp8rl.types import Prompt


class RewardError(ValueError):
    """A reward that cannot be built; the message names the file, the function or the option."""


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Environment variable: folder with copies of files, by their absolute paths. Relative paths start at the folder in
# the variable with the suffix _FROM, in which the job was submitted.
COPIES = "MEGATRON_FP8RL_OWN_FILES"


def parse(spec: str) -> tuple[Path, str]:
    """(file, function) of ``FILE.py:function``; in a queued job, the file's copy."""
    file, _, name = spec.rpartition(":")
    path = Path(file).expanduser()
    absolute = Path(os.environ.get(f"{COPIES}_FROM", ""), path).absolute()
    copy = Path(os.environ.get(COPIES, "")) / str(absolute).lstrip("/")
    return (copy if os.environ.get(COPIES) and copy.is_file() else path), name


def problem(spec: str) -> str:
    """Why the function cannot be used, without running the file; empty if it can."""
    path, name = parse(spec)
    try:
        tree = tree_of(spec)
    except RewardError as error:
        return str(error)
    names = [node.name for node in tree.body if isinstance(node, _FUNCTIONS)]
    imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    if name in (*names, *(alias.asname or alias.name for alias in imports)):
        return ""
    hint = near_matches(name, names) or f"; it has {', '.join(names) or 'none'}"
    return f"{path} has no function {name!r}{hint}"


def tree_of(spec: str) -> ast.Module:
    """The syntax tree of the file. Raises RewardError if it does not exist or is not Python."""
    path, _ = parse(spec)
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path(".")
        hint = near_matches(path.name, [file.name for file in folder.glob("*.py")])
        raise RewardError(f"{path} does not exist{hint}")
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except SyntaxError as error:
        raise RewardError(f"{path}, line {error.lineno}: {error.msg}") from error
    except ValueError as error:
        raise RewardError(f"{path} is not Python: {error}") from error


def takes_batches(spec: str) -> bool:
    """Whether the function is batched, without running the file."""
    path, name = parse(spec)
    try:
        nodes = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, ValueError):
        return False  # reported by problem()
    args = [node.args for node in nodes if isinstance(node, _FUNCTIONS) and node.name == name]
    return any(argument.arg == "completions" for arg in args for argument in (*arg.args, *arg.kwonlyargs))


def named(spec: str) -> Any:
    """What the file binds to the name, of any type. Raises RewardError."""
    path, name = parse(spec)
    tree_of(spec)
    loaded = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    module = sys.modules[loaded.name] = importlib.util.module_from_spec(loaded)  # dataclasses look it up
    try:
        loaded.loader.exec_module(module)
    except Exception as error:
        raise RewardError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise RewardError(f"{path} has no {name!r}{near_matches(name, dir(module))}")
    return getattr(module, name)


def load(spec: str, options: Mapping[str, Any]) -> Callable[[Sequence[Prompt], Sequence[str]], list[Any]]:
    """The function as ``(prompts, completions) -> numbers or dicts``, with ``options``. Raises RewardError."""
    if reason := problem(spec):
        raise RewardError(reason)
    function, name = named(spec), parse(spec)[1]
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [key for key, p in parameters.items() if p.default is p.empty and p.kind not in optional]

    def called(row: dict[str, Any]) -> Any:
        if missing := [key for key in needed if key not in row]:
            known = ", ".join(sorted(row))
            hint = near_matches(missing[0], row)
            raise RewardError(f"{name} has the parameter {missing[0]!r}, which no row has{hint}; there are {known}")
        value = function(**(row if takes_all else {key: row[key] for key in parameters if key in row}))
        return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value

    def one_by_one(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Any]:
        return [
            called(
                prompt.metadata | options | {"answer": prompt.answer, "prompt": prompt.text, "completion": completion}
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    def at_once(prompts: Sequence[Prompt], completions: Sequence[str]) -> list[Any]:
        columns = dict.fromkeys(key for prompt in prompts for key in prompt.metadata)
        row: dict[str, Any] = {key: [prompt.metadata.get(key) for prompt in prompts] for key in columns}
        row |= options
        row |= {"answer": [prompt.answer for prompt in prompts], "prompts": [prompt.text for prompt in prompts]}
        values = called(row | {"completions": list(completions)})
        if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
            raise RewardError(f"{name} returned {values!r}, and not a list with a reward for each of its completions")
        values = list(values)
        if len(values) != len(completions):
            raise RewardError(f"{spec} returned {len(values)} rewards for {len(completions)} completions")
        return values

    return at_once if "completions" in parameters else one_by_one


async def _awaited(value: Any) -> Any:
    return await value
