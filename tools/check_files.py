"""Check files before a commit: python tools/check_files.py (end-of-file | large-files) FILE...

Prints each file that breaks the rule, and exits with status 1 if there is one. Called by ``.pre-commit-config.yaml``.
"""

from __future__ import annotations

import sys
from pathlib import Path

MAX_BYTES = 1_000_000


def ends_with_one_newline(path: Path) -> bool:
    content = path.read_bytes()
    return not content or (content.endswith(b"\n") and not content.endswith(b"\n\n"))


def is_small(path: Path) -> bool:
    return path.stat().st_size <= MAX_BYTES


CHECKS = {
    "end-of-file": (ends_with_one_newline, "must end with exactly one newline"),
    "large-files": (is_small, f"is larger than {MAX_BYTES:,} bytes"),
}


def main(rule: str, names: list[str]) -> int:
    passes, problem = CHECKS[rule]
    wrong = [name for name in names if not passes(Path(name))]
    for name in wrong:
        print(f"{name} {problem}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
