"""Find the program in a completion. Pure.

Blocks are fenced by backticks or tildes, indented, or not closed. The program is the last Python block that defines a
name which the tests use. Without such names, it is the last block that reads standard input or prints. Blocks with an
example of use, with output, or with shell lines are not programs. Only one program is chosen, so two attempts do not
count twice.
"""

import ast
import builtins
import re
import textwrap
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_fp8rl.envs.rewards.extraction import after_reasoning

_OPENINGS = (
    re.compile(r"(?P<before>[^`]*)(?P<mark>`{3,})[ \t]*(?P<tag>[^`\n]*)$"),
    re.compile(r"(?P<before>[ \t>]*)(?P<mark>~{3,})[ \t]*(?P<tag>[^\n]*)$"),
)
_INLINE_END = re.compile(r"(`{3,})[ \t]*(</\w+>[ \t]*)?$")
_PYTHON = re.compile(r"\{?\.?(?:python|py|ipython)(?![a-z])", re.IGNORECASE)
_MARKDOWN = re.compile(r"(?:markdown|md)(?![a-z])", re.IGNORECASE)
_ELEMENT = re.compile(r"<(answer|code)>\s*\n?(.*?)\s*</\1>", re.DOTALL)
_LOOKS_PYTHON = re.compile(r"^[ \t]*(?:async def|def|class|import|from|@)\b", re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.With)
_INDENT = 4  # Markdown: a fence with this much more indentation is text inside the block


@dataclass(frozen=True)
class Block:
    """One block of code. ``tag``: the text behind its opening fence."""

    text: str
    tag: str = ""


def program_in(completion: str, names: Collection[str] = ()) -> str | None:
    """The program after the reasoning; None if there is none or the reasoning did not end.

    Args:
        names: names that the tests use; empty if the program reads standard input.
    """
    text = after_reasoning(completion)
    fenced = blocks(text)
    candidates = [block for block in fenced if _is_python(block)] if fenced else _without_fence(text)
    if not candidates:
        return None
    chosen = _chosen(candidates, names)
    return _with_missing_parts(candidates[: chosen + 1])


def blocks(text: str) -> list[Block]:
    """All fenced blocks, without their common indentation. A block that is not closed ends with the text."""
    found: list[Block] = []
    lines: list[str] = []
    opening: re.Match[str] | None = None
    for line in text.replace("\r\n", "\n").split("\n"):
        if opening is None:
            opening = _opening(line)
            continue
        mark, before = opening["mark"], opening["before"]
        stripped = line.lstrip(" \t>")
        is_deeper = len(line) - len(stripped) - (len(before) - len(before.lstrip(" \t>"))) >= _INDENT
        if stripped.startswith(mark) and not is_deeper:
            found.append(_block(lines, opening))
            following = _opening(line)  # an opening fence also ends a block that was not closed
            opening, lines = following if following and _PYTHON.match(following["tag"]) else None, []
        elif not stripped.startswith(mark) and (end := _INLINE_END.search(line)) and end[1].startswith(mark):
            found.append(_block([*lines, line[: end.start()]], opening))
            opening, lines = None, []
        else:
            lines.append(line)
    if opening is not None and lines:
        found.append(_block(lines, opening, is_closed=False))
    parts = [blocks(block.text) if _MARKDOWN.match(block.tag) else [block] for block in found]
    return [block for part in parts for block in part]


def parsed(text: str) -> ast.Module | None:
    """The syntax tree of a program; None if it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes such as "\\d"
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def compiles(text: str) -> bool:
    """Whether a text is a whole program: unlike a syntax tree, this rejects ``return`` outside of a function."""
    tree = parsed(text)
    try:
        return tree is not None and compile(tree, "answer.py", "exec", dont_inherit=True) is not None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def used_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """(names that are read and defined nowhere in the tree, those of them that are no built-in)."""
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    free = loaded - _bound(tree)
    return free, {name for name in free if not hasattr(builtins, name)}


def defined_names(text: str) -> set[str]:
    """Names of functions, classes and variables at the top level, also of a program with a syntax error."""
    tree = parsed(text)
    if tree is None:
        return set(re.findall(r"^(?:async def|def|class)\s+(\w+)", text, re.MULTILINE))
    return _top_level(tree.body)


def _opening(line: str) -> re.Match[str] | None:
    return next(filter(None, (pattern.match(line) for pattern in _OPENINGS)), None)


def _block(lines: Sequence[str], opening: re.Match[str], is_closed: bool = True) -> Block:
    if opening["before"].lstrip().startswith(">"):  # a quotation
        lines = [re.sub(r"^[ \t]*>[ \t]?", "", line) for line in lines]
    text = textwrap.dedent("\n".join(lines)) + "\n"
    return Block(text if is_closed else text.partition("</answer>")[0], opening["tag"].strip())


def _is_python(block: Block) -> bool:
    if _PYTHON.match(block.tag):
        return True
    tree = parsed(block.text)
    if tree is None:
        return not block.tag and _LOOKS_PYTHON.search(block.text) is not None
    return any(not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body)


def _without_fence(text: str) -> list[Block]:
    """The program of a text without fences: an element <answer> or <code>, the text itself, or indented parts."""
    elements = [match[2] for match in _ELEMENT.finditer(text)]
    inner = textwrap.dedent(elements[-1] if elements else text)
    if _is_code(inner):
        return [Block(inner)]
    parts = re.findall(r"(?:(?<=\n\n)|\A)((?:(?: {4}|\t)[^\n]*(?:\n|\Z)|[ \t]*\n(?=(?:\n|[ ]{4}|\t)))+)", inner)
    return [Block(part) for part in map(textwrap.dedent, parts) if _is_code(part)]


def _is_code(text: str) -> bool:
    tree = parsed(text)
    return tree is not None and any(
        isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Assign, ast.Import, ast.ImportFrom))
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        for node in tree.body
    )


def _chosen(candidates: Sequence[Block], names: Collection[str]) -> int:
    """The index of the program among Python blocks."""
    last = len(candidates) - 1
    if names:
        return max((i for i, block in enumerate(candidates) if defined_names(block.text) & set(names)), default=last)
    fits = [test for test in (_reads, _prints) if any(test(block.text) for block in candidates)]
    chosen = max(i for i, block in enumerate(candidates) if fits[0](block.text)) if fits else last
    defined = _only_defines(candidates[chosen].text)
    return max((i for i in range(chosen, last + 1) if defined & _called(candidates[i].text)), default=chosen)


def _only_defines(text: str) -> set[str]:
    """The names of functions in a block that only defines; empty if the block also runs them."""
    tree = parsed(text)
    kinds = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)
    return _top_level(tree.body) if tree and all(isinstance(node, kinds) for node in tree.body) else set()


def _called(text: str) -> set[str]:
    """Names that the top level of a block calls."""
    tree = parsed(text)
    nodes = [node for node in tree.body if not isinstance(node, (*_FUNCTIONS, ast.ClassDef))] if tree else []
    calls = [call.func for node in nodes for call in ast.walk(node) if isinstance(call, ast.Call)]
    return {function.id for function in calls if isinstance(function, ast.Name)}


def _reads(text: str) -> bool:
    """Whether a program reads standard input."""
    tree = parsed(text)
    if tree is None:
        return re.search(r"\binput\(|\bstdin\b", text) is not None
    return any(
        (isinstance(node, ast.Attribute) and node.attr == "stdin" and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Name) and node.id in ("input", "stdin", "open") and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.ImportFrom) and any(alias.name == "stdin" for alias in node.names))
        for node in ast.walk(tree)
    )


def _prints(text: str) -> bool:
    return re.search(r"\bprint\(|\bstdout\b", text) is not None


def _with_missing_parts(candidates: Sequence[Block]) -> str:
    """The last block, after earlier blocks that define names which it uses and does not define."""
    text = candidates[-1].text
    for block in reversed(candidates[:-1]):
        tree = parsed(text)
        if tree is None:
            break
        if used_names(tree)[1] & defined_names(block.text) and parsed(block.text) is not None:
            text = f"{block.text}\n{text}"
    return text


def _top_level(body: Sequence[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        elif isinstance(node, _BRANCHES):
            names |= _top_level([*node.body, *getattr(node, "orelse", ())])
    return names


def _bound(tree: ast.AST) -> set[str]:
    """Every name that is assigned, defined, imported or an argument anywhere in a tree."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names
