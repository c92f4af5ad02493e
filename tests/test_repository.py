"""Rules that hold for every file of the repository."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron_fp8rl import config
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.observe.metrics import meaning

ROOT = Path(__file__).parents[1]
TEXT = {".py", ".md", ".toml", ".sh", ".cfg", ".ini", ".txt", ""}


def tracked_files() -> list[Path]:
    """Files under version control, and new ones that would be; all files where git is missing."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if listed.returncode:
        pytest.skip("not a git repository")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def text_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix in TEXT]


def library_files() -> list[Path]:
    return [path for path in tracked_files() if path.suffix == ".py" and path.is_relative_to(ROOT / "megatron_fp8rl")]


def test_no_machine_is_named():
    """Paths and hosts of one machine work nowhere else."""
    args = ["/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "pypi" + ".org", "files.python" + "hosted"]
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in args
        if word in line
    ]
    assert not wrong, "\n".join(wrong)


def test_no_code_stands_in_an_init():
    wrong = []
    for path in library_files():
        if path.name == "__init__.py":
            code = [
                n
                for n in ast.parse(path.read_text()).body
                if not isinstance(n, ast.Expr) and "__version__" not in ast.unparse(n)
            ]
            wrong += [f"{path.relative_to(ROOT)}:{n.lineno}" for n in code]
    assert not wrong, "\n".join(wrong)


def test_private_names_stay_in_their_folder():
    """A name with an underscore, of a module of ours, is used in the module's own folder alone."""
    ours = ("megatron_fp8rl", "launch", "checkpoint_tools", "model_configs")
    wrong = []
    for path in tracked_files():
        place = path.relative_to(ROOT)
        if path.suffix != ".py" or place.parts[0] not in ours:
            continue
        tree, modules = ast.parse(path.read_text(encoding="utf-8")), {}
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ours:
                continue
            for alias in node.names:
                target = Path(*node.module.split("."))
                modules[alias.asname or alias.name] = target  # the folder of an imported module
                if alias.name.startswith("_") and not alias.name.startswith("__") and target.parent != place.parent:
                    wrong.append(f"{place}:{node.lineno} imports {node.module}.{alias.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                if is_private and modules[node.value.id] != place.parent:
                    wrong.append(f"{place}:{node.lineno} uses {node.value.id}.{node.attr}")
    assert not wrong, "\n".join(wrong)


def test_importing_the_trainer_changes_nothing():
    program = (
        "import os, sys, torch\n"
        "def state():\n"
        "    found = [torch.Tensor.type, torch.Tensor.cuda, torch.cuda.current_device, torch.cuda.is_available]\n"
        "    return found, dict(os.environ), list(sys.meta_path)\n"
        "before = state()\n"
        "import megatron_fp8rl.trainer\n"
        "after = state()\n"
        "sys.exit(0 if before == after else 'importing megatron_fp8rl.trainer changes torch, environ or meta_path')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_map_shows_the_tree(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import module_map
    from test_imports import LAYERS, PROGRAMS

    text = module_map.README.read_text(encoding="utf-8")
    assert text == module_map.updated(text, LAYERS + PROGRAMS), "run python tools/module_map.py --write"


def test_every_module_says_what_it_is():
    wrong = [
        str(path.relative_to(ROOT))
        for path in library_files()
        if (text := path.read_text()).strip() and ast.get_docstring(ast.parse(text)) is None
    ]
    assert not wrong, "without a docstring: " + ", ".join(wrong)


def test_file_names_say_what_is_inside():
    names = {"utils", "helpers", "misc", "common"}
    wrong = [str(path.relative_to(ROOT)) for path in library_files() if path.stem in names]
    assert not wrong, ", ".join(wrong)


def test_logprobs_always_say_whose():
    """A bare name mixes up rollout_, old_, trainer_ and ref_ log-probabilities."""
    bare = re.compile(r"(?<![\w.])(?:log_?probs|logprobs_T)(?=\s*[:=](?!=))")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in library_files()
        # The trainer's forward computes whichever its weights are, and vLLM names its own fields so.
        if path.relative_to(ROOT / "megatron_fp8rl").parts[0] not in ("trainer", "rollout")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bare.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_stub_is_left():
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|raise NotImplemented" + r"Error\(\)")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in library_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not wrong, ", ".join(wrong)


def test_links_between_documents_lead_somewhere():
    link = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
    wrong = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in tracked_files()
        if path.suffix == ".md"
        for target in link.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_versions_are_named_in_one_place():
    """requirements.toml is the only place for exact versions."""
    pins = tomllib.loads((ROOT / "requirements.toml").read_text())
    assert re.fullmatch(r"3\.\d+", pins["python"])
    listed = {
        *pins["core"],
        *pins["engine"],
        *pins["fetched"].values(),
        *(r for extra in pins["extras"].values() for r in extra),
    }
    exact = [
        requirement
        for requirement in [*listed, *(o for overrides in pins["overrides"].values() for o in overrides)]
        if "==" in requirement
    ]
    assert len(exact) >= 8
    for path in text_files():
        # What the locks hold is compared with the pins in tests/unit/test_install.py.
        if path.name != "requirements.toml" and path.suffix != ".md" and path.parent.name != "locks":
            text = path.read_text(encoding="utf-8")
            assert not [pin for pin in exact if pin in text], path.relative_to(ROOT)


def test_documents_name_options_and_metrics_that_exist():
    options = {f"--{field.name}" for field in dataclasses.fields(RunConfig)}
    for section in dataclasses.fields(RunConfig):
        kind = getattr(config, str(section.type), None)
        if dataclasses.is_dataclass(kind):
            options |= {f"--{section.name}.{field.name}" for field in dataclasses.fields(kind)}
    sections = {option.removeprefix("--") for option in options if "." not in option}
    wrong = []
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        text, place = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        for option in re.findall(r"--[a-z_-]+\.[a-z_-]+", text):
            named = "--" + option[2:].replace("-", "_")
            if named.partition(".")[0][2:] in sections and named not in options:
                wrong.append(f"{place}: {option}")
        for key in re.findall(r"`([a-z_]+/[a-z0-9_]+/(?:mean|std|min|max|sum|s))`", text):
            if meaning(key) is None:
                wrong.append(f"{place}: {key}")
    assert not wrong, "\n".join(wrong)


def test_test_files_have_names_of_their_own():
    """pytest imports them by their bare names, so two of one name cannot be collected together."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_pytest_enters_every_folder_of_tests(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    parts = {part for folder in folders for part in folder.relative_to(ROOT).parts}
    assert "dist" in parts and not [part for part in parts if any(fnmatch(part, pattern) for pattern in patterns)]
