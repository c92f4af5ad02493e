"""``make release``: what stops it, what it builds, and what it tells to publish."""

import hashlib
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.helpers.tools import load_tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def release():
    """tools/release.py as a module."""
    return load_tool("release")


def checkout(folder: Path, citation: str = "0.2.0") -> Path:
    """A repository with the files that state a version, committed."""
    texts = {
        "megatron_fp8rl/__init__.py": '__version__ = "0.2.0"\n',
        "CITATION.cff": f"cff-version: 1.2.0\nversion: {citation}\n",
        "CHANGELOG.md": "# Changelog\n\n## 0.2.0 (2027-01-01)\n\nMore.\n\n### Limits\n\nFew.\n\n## 0.1.0\n\nFirst.\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "-A"), (*identity, "commit", "-qm", "first")):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_this_checkout_states_one_version_and_has_notes_for_it(release):
    version = release.version_of(ROOT)
    assert len(release.notes_of((ROOT / "CHANGELOG.md").read_text(), version).splitlines()) > 20


def test_versions_that_differ_and_changes_without_a_commit_stop_a_release(release, tmp_path):
    root = checkout(tmp_path / "one", citation="0.1.9")
    with pytest.raises(release.ReleaseError, match=r"versions differ: .*__init__.py 0.2.0, CITATION.cff 0.1.9, CHANGE"):
        release.build(root, root / "out")
    root = checkout(tmp_path / "two")
    (root / "new.py").write_text("")
    with pytest.raises(release.ReleaseError, match=r"^new.py is not committed"):
        release.build(root, root / "out")
    assert not (root / "out").exists()


def test_the_notes_are_those_of_the_version(release, tmp_path):
    text = (checkout(tmp_path) / "CHANGELOG.md").read_text()
    assert release.notes_of(text, "0.2.0") == "More.\n\n### Limits\n\nFew.\n"
    assert release.notes_of(text, "0.1.0") == "First.\n"


def test_a_wheel_that_needs_the_checkout_is_not_released(release, tmp_path):
    wheel = tmp_path / "megatron_fp8rl-0.2.0-py3-none-any.whl"
    info = "megatron_fp8rl-0.2.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        # Without megatron_fp8rl_programs, model_configs is in the checkout alone.
        file.writestr("megatron_fp8rl/__init__.py", "")
        file.writestr(
            "megatron_fp8rl/__main__.py", "import numpy, model_configs; print('tiny_qwen3_moe on a checkout')"
        )
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: megatron-fp8rl\nVersion: 0.2.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    with pytest.raises(release.ReleaseError, match="No module named 'model_configs'"):
        release.check_wheel(wheel, tmp_path)


@pytest.mark.slow
def test_a_release_of_this_commit_is_whole(release, tmp_path, monkeypatch, capsys):
    pytest.importorskip("mkdocs")
    root, out = tmp_path / "clone", tmp_path / "out"
    subprocess.run(["git", "clone", "-q", ROOT, root], check=True)
    monkeypatch.setattr(release, "ROOT", root)
    monkeypatch.setattr(release, "OUT", out)
    assert release.main() == 0
    said = capsys.readouterr().out
    assert said.startswith("Nothing was published.")
    sums = dict(reversed(line.split("  ")) for line in (out / "SHA256SUMS").read_text().splitlines())
    assert {*sums, "SHA256SUMS"} == {path.name for path in out.iterdir()}
    assert all(hashlib.sha256((out / name).read_bytes()).hexdigest() == digest for name, digest in sums.items())
    assert all(name in said for name in sums)
    image, docs = (next(out.glob(f"*-{kind}.tar.gz")) for kind in ("image", "docs"))
    with tarfile.open(image) as file:
        assert {"Makefile", "tools/Dockerfile", "tools/bootstrap.sh", "locks/gpu.txt"} <= set(file.getnames())
    with tarfile.open(docs) as file:
        assert f"{docs.name.removesuffix('-docs.tar.gz')}/quickstart.html" in file.getnames()
