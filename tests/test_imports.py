"""Who may import whom: the layers of the library, and the folders that know a third party.

The rules are the drawing in docs of the layout; a module that breaks one is named with the import that does.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "megatron_fp8rl"

# Lowest first; a module may import its own layer and those below. The longest prefix decides.
LAYERS = {
    "types": 0,
    "config": 0,
    "config_check": 1,
    "algo": 1,
    "fp8": 1,
    "data": 1,
    "envs": 1,
    "observe": 1,
    "weights.names": 1,
    "weights.plan": 1,
    "weights.digest": 1,
    "weights.exchange": 1,
    "weights.partial": 1,
    "weights.partial_kernel": 1,
    "weights.digest_kernel": 1,
    "envs.remote_scoring": 2,
    "envs.score_server": 2,
    "cli": 2,
    "trainer": 2,
    "rollout": 2,
    "weights": 3,
}
TOP = 4  # rl_loop, sft_loop, study, __main__ and what else lies beside them
BLIND = {"trainer": "rollout", "rollout": "trainer"}  # these never see each other

# Third parties that few places know, so that a change of theirs stays there.
CONFINED = {
    "megatron": ("trainer/", "weights/export.py"),
    "transformer_engine": ("trainer/", "fp8/recipe.py"),
    "vllm": ("rollout/", "trainer/fused_attention.py", "trainer/routing.py"),  # there for a kernel
    "nemo_run": (),
    "wandb": ("observe/",),
    "matplotlib": ("observe/",),
    "tyro": ("cli.py",),
    "reasoning_gym": ("envs/",),
}
NEVER = ("megatron.training", "megatron.rl")
LIGHT = (
    "megatron_fp8rl.config",
    "megatron_fp8rl.types",
    "megatron_fp8rl.config_check",
    "megatron_fp8rl.cli",
    "megatron_fp8rl.doctor",
    "megatron_fp8rl.envs.score_server",
    "model_configs",
)


def library_files() -> list[Path]:
    return sorted((ROOT / LIBRARY).rglob("*.py"))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import that runs; those for type checkers alone do not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def layer_of(dotted: str) -> int:
    """Layer of a module within the library."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        if (prefix := ".".join(parts[:length])) in LAYERS:
            return LAYERS[prefix]
    return TOP


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT / LIBRARY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_lower_layers_do_not_import_higher_ones():
    wrong = []
    for path in library_files():
        module = module_of(path)
        if not module or module == "weights":
            continue  # an empty package file
        for line, name in imported_names(path):
            if not name.startswith(f"{LIBRARY}."):
                continue
            target = name.removeprefix(f"{LIBRARY}.")
            if target.startswith("__version__"):
                continue
            top, target_top = module.partition(".")[0], target.partition(".")[0]
            if layer_of(target) > layer_of(module) or BLIND.get(top) == target_top:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_third_parties_stay_where_they_are_known():
    wrong = []
    for path in library_files():
        place = path.relative_to(ROOT / LIBRARY).as_posix()
        for line, name in imported_names(path):
            allowed = CONFINED.get(name.partition(".")[0])
            if allowed is not None and not place.startswith(allowed or "nowhere"):
                wrong.append(f"{place}:{line} imports {name}; only {', '.join(allowed) or 'no file here'} may")
            if name.startswith(NEVER):
                wrong.append(f"{place}:{line} imports {name}, a program and not a library")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", LIGHT)
def test_what_a_login_node_needs_imports_without_torch(module):
    program = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
