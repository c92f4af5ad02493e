"""The package order: which packages may import which, and where third parties may be imported.

``megatron_fp8rl/README.md`` shows the layers. A failure names the module and the import that breaks a rule.
"""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "megatron_fp8rl"

# Lowest layer first. A package imports only itself and the packages before it. So do the top-level files listed here.
LAYERS = tuple(
    (
        "upstream token_array kept_entries types config config_source kernels names precision net algo envs data "
        "observe trainer runtime weight_sync rollout preflight"
    ).split()
)
PROGRAMS = (
    "report",
    "diagnose",
    "commands",
)  # run by themselves or by a command: nothing else in the library imports them
COMMANDS = ("__main__",)

# Third parties that few places know, so that a change of theirs stays there.
CONFINED = {
    "megatron": ("trainer/",),
    "transformer_engine": ("trainer/", "kernels/"),
    "vllm": ("rollout/", "kernels/"),  # in kernels for kernels
    "nemo_run": (),
    "wandb": ("observe/",),
    "matplotlib": ("report/",),
    "tyro": ("cli.py",),
    "reasoning_gym": ("envs/",),
}
OURS = (LIBRARY, "benchmarks", "checkpoint_tools", "examples", "launch", "model_configs")
NEVER = ("megatron.training", "megatron.rl")
LIGHT = tuple(
    (
        "megatron_fp8rl.config megatron_fp8rl.types megatron_fp8rl.preflight.rules megatron_fp8rl.cli "
        "megatron_fp8rl.preflight.doctor megatron_fp8rl.preflight.plan megatron_fp8rl.precision.formats model_configs "
        "launch.__main__,launch.cli,launch.plan,launch.slurm,launch.local,launch.agent,launch.jobs,launch.sweep"
    ).split()
)


def library_files() -> list[Path]:
    return sorted((ROOT / LIBRARY).rglob("*.py"))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import at run time; imports for type checkers do not count."""
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
    """Return the place of a module in the package order; loops and commands come after all packages."""
    top = dotted.partition(".")[0]
    return LAYERS.index(top) if top in LAYERS else len(LAYERS)


def module_of(path: Path) -> str:
    parts = list(path.relative_to(ROOT / LIBRARY).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_a_package_imports_only_lower_layers():
    wrong = []
    for path in library_files():
        module = module_of(path)
        top = module.partition(".")[0]
        for line, name in imported_names(path):
            if not name.startswith(f"{LIBRARY}."):
                continue
            target = name.removeprefix(f"{LIBRARY}.")
            target_top = target.partition(".")[0]
            if target_top in PROGRAMS and top not in (*PROGRAMS, *COMMANDS):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, a program")
            elif top not in PROGRAMS and layer_of(target) > layer_of(module) and target != "__version__":
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which is in a higher layer")
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_without_cycles():
    """Imports inside functions count; imports for type checkers do not."""
    modules = {f"{LIBRARY}.{module_of(path)}": path for path in library_files()}
    imported = {
        module: {name if name in modules else name.rpartition(".")[0] for _, name in imported_names(path)}
        for module, path in modules.items()
    }
    sorted_ = graphlib.TopologicalSorter({module: names & modules.keys() for module, names in imported.items()})
    sorted_.prepare()  # raises CycleError that names the modules


def bound_names(path: Path) -> set[str]:
    """What a module binds at its top level, in branches of conditions and of ``try`` too."""
    result: set[str] = set()
    statements: list[ast.AST] = [*ast.parse(path.read_text()).body]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            result.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            result |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            result.add(node.id)
        else:
            statements += ast.iter_child_nodes(node)
    return result


def file_of(dotted: str) -> Path | None:
    """The file or folder of a module of this repository."""
    place = ROOT.joinpath(*dotted.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py", place) if path.exists()), None)


def test_every_name_that_is_imported_exists_in_functions_too():
    """Imports inside functions run late, for example only on a GPU."""
    wrong = []
    for path in [path for folder in OURS for path in sorted((ROOT / folder).rglob("*.py"))]:
        for line, dotted in imported_names(path):
            module, _, name = dotted.rpartition(".")
            if dotted.partition(".")[0] not in OURS or file_of(dotted) is not None:
                continue
            source = file_of(module)
            if source is None or (source.is_file() and name not in bound_names(source)):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {dotted}, which does not exist")
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
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'numpy', 'matplotlib', 'nemo_run'} & set(sys.modules)\n"
        "sys.exit(f'imports {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
