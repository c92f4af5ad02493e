"""Write the map of modules in megatron_fp8rl/README.md: a tree with one caption for every module.

    python tools/module_map.py --write

A caption is the first sentence of the module's docstring, so the map agrees with the module. Long captions are wrapped.
Without ``--write`` the program prints the tree. ``tests/test_repository.py`` checks that the README is up to date.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import textwrap
from pathlib import Path

LIBRARY = Path(__file__).parents[1] / "megatron_fp8rl"
README = LIBRARY / "README.md"
BEGIN, END = "<!-- begin tree -->", "<!-- end tree -->"
WIDTH, INDENT = 120, 26
# The files to read first, in order: from a prompt to the published weights.
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
    """Return the first sentence of a module's docstring, without its full stop."""
    paragraph = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
    return re.split(r"\.(?=\s|$)", " ".join(paragraph.split()))[0].rstrip(":,")


def modules() -> list[Path]:
    """Return all modules of the library in alphabetical order."""
    return sorted(path for path in LIBRARY.rglob("*.py") if path.name != "__init__.py")


def num_path_lines() -> int:
    """Return the number of lines of the files to read first."""
    return sum(len((LIBRARY / name).read_text(encoding="utf-8").splitlines()) for name in PATH)


def tree(layers: tuple[str, ...]) -> str:
    """Return the tree as Markdown: top-level files first, then folders in the order of ``layers``."""
    by_folder: dict[str, list[Path]] = {}
    for path in modules():
        by_folder.setdefault(path.parent.relative_to(LIBRARY).as_posix(), []).append(path)
    order = [".", *layers]
    lines = ["```"]
    for folder in sorted(by_folder, key=lambda name: (order.index(name.partition("/")[0]), name)):
        lines.append("megatron_fp8rl/" if folder == "." else f"{folder}/")
        for path in by_folder[folder]:
            mark = "*" if path.relative_to(LIBRARY).as_posix() in PATH else " "
            text = f"{mark} {path.name:<23} {caption(path)}"
            lines += textwrap.wrap(text, WIDTH, subsequent_indent=" " * INDENT, break_on_hyphens=False)
    return "\n".join([*lines, "```", "", f"The path marked * has {num_path_lines():,} lines."])


def updated(text: str, layers: tuple[str, ...]) -> str:
    """Return the text of the README with the present tree."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{tree(layers)}\n{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tree in megatron_fp8rl/README.md")
    options = parser.parse_args()
    sys.path.insert(0, str(LIBRARY.parent / "tests"))
    from test_imports import LAYERS, PROGRAMS  # the only definition of the package order

    if options.write:
        README.write_text(updated(README.read_text(encoding="utf-8"), LAYERS + PROGRAMS), encoding="utf-8")
    else:
        print(tree(LAYERS + PROGRAMS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
