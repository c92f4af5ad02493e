"""The locked versions of everything that an installation brings: python tools/lock.py [--write]

In: requirements.toml, and the index that uv is configured for. Out: locks/cpu.txt and locks/gpu.txt, which
tools/install.py gives the installer as constraints. Without --write, the exit status is 1 if they no longer follow from
the pins. Resolves for Linux on x86-64 and Python 3.12, on any machine; downloads metadata alone. Locked versions stay.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from install import LOCKS, PINS, ROOT, requirements

EXTRAS = ("launch", "test", "lint", "docs")
_HOW = (
    "--quiet",
    "--no-header",
    "--no-annotate",
    "--python-version",
    "3.12",
    "--python-platform",
    "x86_64-manylinux_2_28",
)


def resolve(hardware: str, target: Path) -> None:
    """Write what ``make install`` brings on this hardware. Raises CalledProcessError with what uv said."""
    extras = [hardware, *EXTRAS]
    overrides = [override for extra in extras for override in PINS["overrides"].get(extra, ())]
    with tempfile.TemporaryDirectory() as folder:
        wanted, over = Path(folder) / "wanted.in", Path(folder) / "overrides.txt"
        wanted.write_text("\n".join(requirements(extras)) + "\n")
        over.write_text("\n".join(overrides) + "\n")
        uv = ROOT / ".venv" / "bin" / "uv"
        command = [uv, "pip", "compile", *_HOW, "--no-emit-index-url", "--no-emit-find-links", "--override", over]
        subprocess.run([*map(str, command), "-o", str(target), str(wanted)], check=True)


def main(arguments: list[str]) -> int:
    stale = []
    for hardware in ("cpu", "gpu"):
        lock = LOCKS / f"{hardware}.txt"
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / lock.name
            if lock.exists():
                shutil.copy(lock, found)
            resolve(hardware, found)
            if not lock.exists() or found.read_text() != lock.read_text():
                stale.append(str(lock.relative_to(ROOT)))
                if "--write" in arguments:
                    lock.parent.mkdir(exist_ok=True)
                    shutil.copy(found, lock)
    print(
        f"{'written' if '--write' in arguments else 'stale'}: {', '.join(stale)}"
        if stale
        else "the locks follow from the pins"
    )
    return int(bool(stale) and "--write" not in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
