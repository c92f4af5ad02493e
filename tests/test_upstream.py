"""Patches of other packages: each has a range; required ones refuse other versions, optional ones are skipped."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from megatron_fp8rl import upstream
from megatron_fp8rl.precision import kernel_support

LIBRARY = Path(__file__).parents[1] / "megatron_fp8rl"
ALLOWED = ("trainer/compat/", "rollout/vllm_plugin/patches", "kernels/compat.py")
NOT_PRIVATE = {
    "_replace",  # a documented method of named tuples
    "_exit",  # a documented function of os
    "_current_frames",  # a documented function of sys
}
OVERRIDING = ("megatron.", "vllm.", "transformer_engine.")  # packages whose classes change from release to release


@pytest.fixture(autouse=True)
def without_switches(monkeypatch):
    for switch in (upstream.GO_ON, upstream.SKIP):
        monkeypatch.delenv(switch, raising=False)


def test_every_patch_says_what_it_was_tested_with():
    actual = upstream.registered()
    assert len({patch.name for patch in actual}) == len(actual) > 30
    assert {patch.package for patch in actual} == {"megatron-core", "torch", "transformer-engine", "vllm"}
    for patch in actual:
        operators = {specifier.operator for specifier in SpecifierSet(patch.versions)}
        assert operators == {">=", "<"}, f"{patch.name}: {patch.versions} has to have both ends"
        assert patch.why and patch.remove_when


def test_a_range_of_no_patch_is_refused(monkeypatch):
    monkeypatch.setattr(upstream, "TESTED_LESS", {">=1,<2": ("kernels/compat.py:no_such_patch",)})
    with pytest.raises(ValueError, match="no patch is named kernels/compat.py:no_such_patch"):
        upstream.registered.__wrapped__()


def test_optional_patches_are_asked_for_by_names_of_their_own():
    names = [patch.short_name for patch in upstream.registered() if patch.optional]
    assert len(set(names)) == len(names) > 10
    asked = {
        argument.value
        for path in LIBRARY.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("applies", "_untested"))
        for argument in ast.walk(node)
        if isinstance(argument, ast.Constant) and argument.value in names
    }
    lists = kernel_support.INVARIANT_PATCHES, kernel_support.FP8_CACHE_PATCHES, kernel_support.LATENT_PATCHES_ON_GPU
    needed = {name for group in (*lists, kernel_support.LATENT_PATCHES) for name in group}
    assert asked | needed == set(names), "an optional patch that nobody asks for is applied to any version"


def test_installed_versions_are_in_range(capsys):
    assert not upstream.outside()
    upstream.check()
    assert upstream.main() == 0
    shown = capsys.readouterr().out
    assert all(patch.name in shown for patch in upstream.registered()) and "OUTSIDE" not in shown


@pytest.mark.parametrize("package", ["megatron-core", "torch", "transformer-engine", "vllm"])
def test_other_versions_are_refused_by_name(package, monkeypatch, capsys):
    monkeypatch.setattr(upstream, "installed_version", lambda name: "99.0" if name == package else None)
    with pytest.raises(upstream.UntestedVersion) as caught:
        upstream.check()
    message = str(caught.value)
    for patch in upstream.registered():
        is_refused = patch.package == package and not patch.optional
        assert (f"{patch.name} ({patch.versions})" in message) is is_refused
    assert upstream.GO_ON in message and "docs/extending.md" in message
    assert upstream.main() == 1
    shown = capsys.readouterr().out.splitlines()
    for patch in upstream.registered():
        (line,) = (line for line in shown if line.split("   OUTSIDE")[0].endswith(f"  {patch.name}"))
        assert ("optional" in line, "required" in line) == (patch.optional, not patch.optional)
        assert ("OUTSIDE" in line) is (patch.package == package)
    monkeypatch.setenv(upstream.GO_ON, "1")
    upstream.check()
    assert "Not tested with it" in capsys.readouterr().err


def test_optional_patches_alone_are_no_reason_to_refuse(monkeypatch, capsys):
    """They are skipped, each with one warning that names the patch, its range, the installed version and the cost."""
    optional = tuple(patch for patch in upstream.registered() if patch.optional)
    monkeypatch.setattr(upstream, "registered", lambda: optional)
    monkeypatch.setattr(upstream, "installed_version", lambda name: "99.0")
    upstream._applies.cache_clear()
    upstream.check()
    assert upstream.main() == 0
    capsys.readouterr()
    for patch in optional:
        assert not upstream.applies(patch.short_name) and not upstream.applies(patch.short_name)
        (line,) = capsys.readouterr().err.splitlines()
        assert all(text in line for text in (patch.name, patch.versions, f"{patch.package} 99.0", patch.why))
    monkeypatch.setenv(upstream.GO_ON, "1")
    assert all(upstream.applies(patch.short_name) for patch in optional)
    upstream._applies.cache_clear()


def test_an_optional_patch_can_be_skipped_by_name(monkeypatch, capsys):
    monkeypatch.setenv(upstream.GO_ON, "1")  # so that the installed versions do not matter
    assert upstream.applies("DecodeScheduler", "BufferingScheduler")
    monkeypatch.setenv(upstream.SKIP, "BufferingScheduler,GatherDispatcher")
    assert not upstream.applies("DecodeScheduler", "BufferingScheduler") and upstream.applies("DecodeScheduler")
    assert "patches_scheduler.py:BufferingScheduler is skipped" in capsys.readouterr().err
    for name, skipped in (("GradientBuffers", ""), ("DecodeScheduler", "no_such_patch")):
        monkeypatch.setenv(upstream.SKIP, skipped)
        with pytest.raises(ValueError, match=f"{skipped or name}: no optional patch"):
            upstream.applies(name)


def test_all_packages_are_named_at_once(monkeypatch):
    monkeypatch.setattr(upstream, "installed_version", lambda name: "0.1")
    with pytest.raises(upstream.UntestedVersion) as caught:
        upstream.check()
    assert all(f"{package} 0.1 is installed" in str(caught.value) for package in ("megatron-core", "torch", "vllm"))


def test_local_and_pre_releases_are_versions():
    patch = upstream.Patch(name="a.py:f", package="torch", versions=">=2.11,<2.12", why="", remove_when="")
    assert patch.fits("2.11.0+cu130") and patch.fits("2.11.1rc1") and not patch.fits("2.12.0")


def _is_private(name: object) -> bool:
    return isinstance(name, str) and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _own_names(tree: ast.AST) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, arguments, and attributes of ``self``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def _used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of attributes and imports, also where getattr and its kin name an attribute by a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
                name = node.args[1]
                first = name.values[0] if isinstance(name, ast.JoinedStr) else name
                if isinstance(first, ast.Constant):
                    yield node.lineno, first.value


def test_private_names_of_others_stand_where_they_are_looked_for():
    trees = {path: ast.parse(path.read_text()) for path in LIBRARY.rglob("*.py")}
    # A name of ours that another package has, too, is found by the test of overrides where it is one.
    own = {name for path, tree in trees.items() if not _place(path).startswith(ALLOWED) for name in _own_names(tree)}
    wrong = [
        f"{_place(path)}:{line}: {name}"
        for path, tree in trees.items()
        if not _place(path).startswith(ALLOWED)
        for line, name in _used_names(tree)
        if _is_private(name) and name not in own | NOT_PRIVATE and not name.startswith("_C")
    ]
    assert not wrong, "\n".join(wrong)


def _place(path: Path) -> str:
    return path.relative_to(LIBRARY).as_posix()


def _classes() -> Iterator[type]:
    """Classes of this library that have one of another package above them."""
    for path in sorted(LIBRARY.rglob("*.py")):
        if not any(f"from {package}" in path.read_text() for package in OVERRIDING):
            if "trainer/" not in _place(path):
                continue
        if _place(path).endswith(("__init__.py", "__main__.py", "server.py")):
            continue  # the server's one class is made when it starts
        try:
            module = importlib.import_module("megatron_fp8rl." + _place(path).removesuffix(".py").replace("/", "."))
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("transformer_engine", "transformer_engine_torch", "vllm"):
                raise
            continue
        for thing in vars(module).values():
            if isinstance(thing, type) and thing.__module__ == module.__name__:
                yield thing


@pytest.mark.slow
def test_overrides_are_registered_and_private_ones_stand_in_compat():
    registered, wrong, seen = {patch.name for patch in upstream.registered()}, [], 0
    for cls in _classes():
        place = Path(sys.modules[cls.__module__].__file__).relative_to(LIBRARY).as_posix()
        theirs = [base for base in cls.__mro__ if base.__module__.startswith((*OVERRIDING, "torch.nn."))]
        own = {name for name in vars(cls) if not name.startswith("__")}
        own -= {"_abc_impl", "_is_protocol"}  # which abc and typing give to every class
        overridden = {name for base in theirs for name in own & set(vars(base))} - {"forward"}
        changing = [base for base in theirs if base.__module__.startswith(OVERRIDING)]
        if changing and "forward" in own:
            overridden.add("forward")
        seen += bool(overridden)
        if any(_is_private(name) for name in overridden) and not place.startswith(ALLOWED):
            wrong.append(f"{place}:{cls.__name__} overrides {sorted(overridden)}; private ones belong in compat files")
        if overridden and changing and f"{place}:{cls.__name__}" not in registered:
            wrong.append(f"{place}:{cls.__name__} overrides {sorted(overridden)} without @patches")
    assert seen > 8 and not wrong, "\n".join(wrong)
