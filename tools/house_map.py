"""The map of the house in megatron_fp8rl/README.md: a tree with one caption for every module.

    python tools/house_map.py --write

A caption is the beginning of the module's docstring, so the map cannot contradict the module. Without ``--write`` the
program prints the tree. ``tests/test_repository.py`` compares.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "megatron_fp8rl"
README = LIBRARY / "README.md"
BEGIN, END = "<!-- begin tree -->", "<!-- end tree -->"
MAX_CAPTION = 90
# What a newcomer reads first, from a prompt to the weights that an engine samples with.
PATH = (
    "types.py",
    "rl_loop.py",
    "rollout/stream.py",
    "rollout/client.py",
    "rollout/completions.py",
    "algo/advantages.py",
    "algo/losses.py",
    "algo/objective.py",
    "algo/mismatch.py",
    "trainer/policy.py",
    "trainer/forward.py",
    "trainer/logprobs.py",
    "weight_sync/publish.py",
)


def caption(path: Path) -> str:
    """The first sentence of a module's docstring as far as it fits: a longer one ends before a colon or a comma."""
    first = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    sentence = first.partition(". ")[0].rstrip(".:,")
    if len(sentence) <= MAX_CAPTION:
        return sentence
    ends = [match.start() for match in re.finditer(r"[:;,] ", sentence) if match.start() <= MAX_CAPTION]
    return sentence[: next((i for i in ends if sentence[i] == ":"), ends[-1] if ends else MAX_CAPTION)]


def modules() -> list[Path]:
    """All modules of the library, those of a folder after its folders' names, in the order of the alphabet."""
    return sorted(path for path in LIBRARY.rglob("*.py") if path.name != "__init__.py")


def num_path_lines() -> int:
    """Lines of the path to read first."""
    return sum(len((LIBRARY / name).read_text(encoding="utf-8").splitlines()) for name in PATH)


def tree(floors: tuple[str, ...]) -> str:
    """The tree as Markdown; folders stand in the order of ``floors``, files of the top first."""
    by_folder: dict[str, list[Path]] = {}
    for path in modules():
        by_folder.setdefault(path.parent.relative_to(LIBRARY).as_posix(), []).append(path)
    order = [".", *floors]
    lines = ["```"]
    for folder in sorted(by_folder, key=lambda name: (order.index(name.partition("/")[0]), name)):
        lines.append("megatron_fp8rl/" if folder == "." else f"{folder}/")
        for path in by_folder[folder]:
            mark = "*" if path.relative_to(LIBRARY).as_posix() in PATH else " "
            lines.append(f"{mark} {path.name:<23} {caption(path)}")
    return "\n".join([*lines, "```", "", f"The path marked * has {num_path_lines():,} lines."])


def written(text: str, floors: tuple[str, ...]) -> str:
    """The text of the README with the tree that there is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tree(floors)}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tree in megatron_fp8rl/README.md")
    options = parser.parse_args()
    sys.path.insert(0, str(LIBRARY.parent / "tests"))
    from test_imports import FLOORS, PROGRAMS  # the order of the folders has one home

    if options.write:
        README.write_text(written(README.read_text(encoding="utf-8"), FLOORS + PROGRAMS), encoding="utf-8")
    else:
        print(tree(FLOORS + PROGRAMS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
