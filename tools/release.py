"""Build what a release publishes, of the commit that is checked out: .venv/bin/python tools/release.py

In: a checkout without changes, whose version is the same in the package, CITATION.cff and the newest heading of
CHANGELOG.md. Out: build/release with the wheel, the documentation site, the image file (the folder that
tools/Dockerfile copies), the release notes and their SHA-256. Nothing is published, and no network is needed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "release"
# The wheel, with installed dependencies but without the checkout, which an editable installation would add.
_RUN = "import runpy, sys; sys.path += {folders}; sys.argv = {args}; runpy.run_module(sys.argv[0], run_name='__main__')"


class ReleaseError(Exception):
    """What is wrong and what to do, in one line."""


def version_of(root: Path) -> str:
    """The version of a checkout. Raises ReleaseError unless all files that state it agree."""
    places = {
        "megatron_fp8rl/__init__.py": r'^__version__ = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\d\S*)",
    }
    versions = {}
    for name, pattern in places.items():
        match = re.search(pattern, (root / name).read_text(), re.MULTILINE)
        versions[name] = match[1] if match else "none"
    if len(set(versions.values())) > 1:
        raise ReleaseError("versions differ: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    return versions["CHANGELOG.md"]


def notes_of(changelog: str, version: str) -> str:
    """The text of CHANGELOG.md below the heading of a version."""
    _, _, rest = changelog.partition(f"\n## {version}")
    return re.split(r"^## ", rest.partition("\n")[2], maxsplit=1, flags=re.MULTILINE)[0].strip() + "\n"


def build(root: Path, out: Path) -> dict[str, Path]:
    """Build into an empty ``out``; return the files by what they are: wheel, docs, image, notes."""
    if changes := _output(root, "git", "status", "--porcelain"):
        raise ReleaseError(f"{changes.splitlines()[0].split()[-1]} is not committed: commit or remove it")
    version, commit = version_of(root), _output(root, "git", "rev-parse", "HEAD")
    stem = f"megatron_fp8rl-{version}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    image, docs, notes = out / f"{stem}-image.tar.gz", out / f"{stem}-docs.tar.gz", out / "NOTES.md"
    notes.write_text(notes_of((root / "CHANGELOG.md").read_text(), version))
    _run(root, "git", "archive", "--format=tar.gz", f"--output={image}", commit)
    with tempfile.TemporaryDirectory() as folder:
        # Files that an earlier build left in the checkout stay out of the wheel.
        source, site = Path(folder) / "source", Path(folder) / stem
        shutil.unpack_archive(image, source, filter="data")
        epoch = {"SOURCE_DATE_EPOCH": _output(root, "git", "log", "-1", "--format=%ct")}
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(out))
        _run(source, *pip, "wheel", *options, ".", environment=epoch)
        [wheel] = out.glob("*.whl")
        check_wheel(wheel, Path(folder))
        quiet = {"NO_MKDOCS_2_WARNING": "1"}
        mkdocs = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(site))
        _run(source, *mkdocs, environment=quiet | epoch)
        shutil.make_archive(str(docs).removesuffix(".tar.gz"), "gztar", folder, site.name)
    return {"wheel": wheel, "docs": docs, "image": image, "notes": notes}


def check_wheel(wheel: Path, folder: Path) -> None:
    """Install a wheel into a folder and run a command of it there, without the checkout."""
    target = folder / "installed"
    _run(
        folder, sys.executable, "-m", "pip", "--quiet", "install", "--no-deps", "--no-index", "--target", target, wheel
    )
    packages = [str(Path(path)) for path in sys.path if path.endswith("-packages")]
    code = _RUN.format(folders=[str(target), *packages], args=["megatron_fp8rl", "show", "tiny_qwen3_moe"])
    environment = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    shown = _output(folder, sys.executable, "-S", "-c", code, environment=environment)
    if not shown.startswith("tiny_qwen3_moe on "):
        raise ReleaseError(f"{wheel.name} does not work without the checkout:\n{shown}")


def to_publish(files: dict[str, Path], version: str, commit: str) -> str:
    """What to publish, and how."""
    wheel, docs, image, notes = (files[kind].name for kind in ("wheel", "docs", "image", "notes"))
    return f"""\
Nothing was published. To publish version {version}, in build/release:
  tag      git tag -s v{version} {commit} && git push origin v{version}
  wheel    {wheel}: twine upload {wheel}
           (configures, checks, plans and launches; trainer and engines need `make install` in a clone)
  docs     {docs}: unpack it on any web server, or open index.html
  image    {image}: docker build -f tools/Dockerfile -t REGISTRY/megatron_fp8rl:{version} - < {image}
           docker push REGISTRY/megatron_fp8rl:{version} (the build downloads its base image and packages)
  notes    {notes}: the text of the release, with the files above and SHA256SUMS attached
           (links to docs/ are relative: put the address of the tag before them)"""


def _run(folder: Path, *command: object, environment: dict[str, str] | None = None) -> None:
    _output(folder, *command, environment=environment)


def _output(folder: Path, *command: object, environment: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True)
    if done.returncode:
        raise ReleaseError(f"{' '.join(words)[:300]} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def main() -> int:
    files = build(ROOT, OUT)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files.values()]
    (OUT / "SHA256SUMS").write_text("".join(sums))
    print(to_publish(files, version_of(ROOT), _output(ROOT, "git", "rev-parse", "--short", "HEAD")))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ReleaseError as error:
        sys.exit(f"tools/release.py: {error}")
