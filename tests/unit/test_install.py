"""Finding Python and installing: what can be checked without installing anything."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.tools import load_tool

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install():
    """tools/install.py as a module."""
    return load_tool("install")


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def bootstrap(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run a copy of bootstrap.sh whose installer prints the interpreter that runs it."""
    (folder / "tools").mkdir(exist_ok=True)
    shutil.copy(ROOT / "tools" / "bootstrap.sh", folder / "tools")
    (folder / "tools" / "install.py").write_text("import sys; print(sys.executable, *sys.argv[1:])")
    clean = {"HOME": str(folder / "home"), "PATH": "/usr/bin:/bin", **environment}
    return subprocess.run(
        ["sh", "tools/bootstrap.sh", "test"], cwd=folder, env=clean, capture_output=True, text=True, timeout=60
    )


def test_a_broken_shim_on_the_path_does_not_hide_a_python_that_works(tmp_path):
    script(tmp_path / "shims" / "python3.12", 'echo "python3.12: command not found" >&2; exit 127')
    script(tmp_path / "shims" / "python3", "echo Python 2.7; exit 0; ")
    works = script(
        tmp_path / "home" / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3.12", f'exec {sys.executable} "$@"'
    )
    done = bootstrap(tmp_path, PATH=f"{tmp_path / 'shims'}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "test"
    assert works.exists()


def test_a_named_python_that_does_not_work_is_refused(tmp_path):
    broken = script(tmp_path / "python3.12", "exit 1")
    done = bootstrap(tmp_path, FP8RL_PYTHON=str(broken))
    assert done.returncode == 1
    assert f"FP8RL_PYTHON={broken} is not a Python 3.12" in done.stderr


def test_without_python_one_line_says_how_to_get_it(tmp_path):
    # A shell that cannot start any interpreter: every candidate fails its probe.
    text = (ROOT / "tools" / "bootstrap.sh").read_text()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "bootstrap.sh").write_text(text.replace("print(sys.version_info[:2])", "print()"))
    done = subprocess.run(["sh", "tools/bootstrap.sh"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    for way in (
        "uv python install 3.12",
        "pyenv install 3.12",
        "conda create",
        "apt install python3.12-venv",
        "FP8RL_PYTHON=",
    ):
        assert way in done.stderr


def test_installer_and_packaging_read_the_same_pins(install):
    probe = (
        "import setuptools, json\n"
        "setuptools.setup = lambda **how: print(json.dumps([how['install_requires'], how['extras_require']]))\n"
        "import runpy; runpy.run_path('setup.py')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    core, extras = json.loads(done.stdout)
    assert {"launch", "test"} == set(extras), "pip is offered what pip can install"
    declared = [*core, *extras["launch"], *extras["test"]]
    assert sorted(install.requirements(["launch", "test"])[1:]) == sorted(declared)


def test_pins_are_what_is_installed(install):
    """The tests are valid only for the pinned versions."""
    from importlib.metadata import PackageNotFoundError, version

    wanted = [r for r in install.requirements(["cpu", "test", "lint", "docs"]) if "==" in r]
    differing = []
    for requirement in wanted:
        try:
            actual = version(install.name_of(requirement))
        except PackageNotFoundError:
            continue  # the other engine build
        if actual.partition("+")[0] != requirement.partition("==")[2]:
            differing.append(f"{requirement}, installed {actual}")
    assert not differing, differing


def test_names_of_requirements(install):
    assert install.name_of("transformer-engine[core-cu13,pytorch]==1.0") == "transformer-engine"
    assert install.name_of("Reasoning_Gym>=0.1") == "reasoning-gym"


def test_pip_settings_reach_uv(install, tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://mirror.example/simple\nextra-index-url = https://a.example\n    https://b.example\n"
        "trusted-host = a.example\ncert = /certificates.pem\n"
    )
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_")) or name == "SSL_CERT_FILE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    options, environment = install.uv_indexes()
    args = " ".join(options)
    assert "--default-index https://mirror.example/simple" in args
    assert "--index https://a.example --index https://b.example --index-strategy unsafe-best-match" in args
    assert "--find-links /wheels" in args
    assert "--allow-insecure-host a.example" in args
    assert environment["SSL_CERT_FILE"] == "/certificates.pem"
    monkeypatch.setenv("UV_INDEX", "https://own.example")
    assert "https://a.example" not in install.uv_indexes()[0]


def test_a_stamp_of_other_pins_counts_for_nothing(install, tmp_path, monkeypatch):
    stamp = tmp_path / "stamp.json"
    monkeypatch.setattr(install, "STAMP", stamp)
    monkeypatch.setattr(install, "PYTHON", Path(sys.executable))
    assert install.read_stamp() == {}
    stamp.write_text(json.dumps({"key": install.key(), "hardware": "cpu", "extras": ["cpu"]}))
    assert install.read_stamp()["extras"] == ["cpu"]
    stamp.write_text(json.dumps({"key": "older", "hardware": "cpu", "extras": ["cpu"]}))
    assert install.read_stamp() == {}
    stamp.write_text("{half a stamp")
    assert install.read_stamp() == {}


def test_the_locks_hold_every_pin_and_no_address(install):
    """A constraint must not contradict a pin or name a mirror."""
    for hardware in ("cpu", "gpu"):
        text = (install.LOCKS / f"{hardware}.txt").read_text()
        assert "://" not in text and "--" not in text
        locked = {install.name_of(line): line.partition("==")[2].partition(" ")[0] for line in text.splitlines()}
        for requirement in install.requirements([hardware, "launch", "test", "lint", "docs"]):
            if "==" in requirement:
                assert locked[install.name_of(requirement)] == requirement.partition("==")[2]
    major, minor = (int(part) for part in locked["nvidia-cublas"].split(".")[:2])
    assert (major, minor) >= (13, 2), "what Transformer Engine needs"


@pytest.mark.slow
def test_a_resolver_finds_the_locked_versions_from_the_pins():
    """For both kinds of hardware, whatever this machine has; metadata alone is downloaded."""
    done = subprocess.run([sys.executable, "tools/lock.py"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    if "client error" in done.stderr or "dns error" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_library_that_the_system_lacks_is_named_with_what_to_install(install):
    install.require_libraries()  # this machine has them
    with pytest.raises(install.InstallError, match="libnothing.so.9 is missing.*apt install"):
        install.require_libraries(("libnothing.so.9",))


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "a\n/te/common.h:11:10: fatal error: cudnn.h: No such file or directory\n   11 | #include\n",
            "header cudnn.h is",
        ),
        (
            "catastrophic error: cannot open\nx.cu(3): fatal error: 'crt/host_defines.h' file not found\n",
            "crt/host_defines.h",
        ),
        ("OSError: CUDA_HOME environment variable is not set.\n", "no CUDA toolkit was found"),
        ("RuntimeError: CUDA not found.\n", "no CUDA toolkit was found"),
        ("error: no space left on device\n", ""),
    ],
)
def test_a_compilation_that_fails_says_what_is_missing(install, tmp_path, monkeypatch, capfd, output, cause):
    """In one line; the output is in a file."""
    monkeypatch.setattr(install, "VENV", tmp_path)
    program = f"import sys; print({output!r} * 99); sys.exit(1)"
    with pytest.raises(install.InstallError) as failed, install.compiling():
        install.run([sys.executable, "-c", program])
    said = str(failed.value)
    assert cause in said and "compile.log" in said and "\n" not in said and ("CUDA 13" in said) == bool(cause)
    assert (tmp_path / "compile.log").read_text().count(output) == 99
    assert len(capfd.readouterr().out.splitlines()) == 1 and install.OUTPUT is None
