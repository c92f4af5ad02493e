"""Install this project with pinned dependencies into ``.venv``: python3.12 tools/install.py [EXTRA...]

In: requirements.toml and the names of extras; ``cpu`` or ``gpu`` is added, by FP8RL_EXTRA or by whether nvidia-smi
works. Out: ``.venv`` with the project in editable mode, and a stamp in it, so that the next call ends at once when
nothing has changed. Runs under Python 3.12 before anything is installed: the standard library alone.

uv installs, because it takes the overrides that the pins need; where uv cannot be had, pip does the same in steps. Both
use the indexes that pip is configured for.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "fp8rl-installed.json"
LOCKS = ROOT / "locks"
OUTPUT = None  # file for the output of commands; None: the terminal
PINS = tomllib.loads((ROOT / "requirements.toml").read_text())


class InstallError(Exception):
    """What went wrong and what to do, in one line."""


def main(extras: list[str]) -> int:
    unknown = set(extras) - set(PINS["extras"])
    if unknown:
        raise InstallError(f"unknown extra {', '.join(sorted(unknown))}; extras: {', '.join(PINS['extras'])}")
    with only_one_at_a_time():
        stamp = read_stamp()
        hardware = os.environ.get("FP8RL_EXTRA") or stamp.get("hardware") or detect_hardware()
        if hardware not in ("cpu", "gpu"):
            raise InstallError(f"FP8RL_EXTRA={hardware}: use cpu or gpu")
        wanted = {hardware, *extras} - ({"cpu", "gpu"} - {hardware})
        if stamp.get("hardware") == hardware and wanted <= set(stamp["extras"]):
            return 0
        if stamp.get("hardware") == hardware:
            wanted |= set(stamp["extras"])  # what was asked for before stays
        if hardware == "cpu":
            require_libraries()
        start = time.monotonic()
        print(f"Installing into {VENV} for {', '.join(sorted(wanted))}: several GB, once.", flush=True)
        make_venv()
        install(sorted(wanted))
        STAMP.write_text(json.dumps({"key": key(), "hardware": hardware, "extras": sorted(wanted)}) + "\n")
        print(f"Installed in {time.monotonic() - start:.0f} s.", flush=True)
    return 0


def require_libraries(names: tuple[str, ...] = ("libnuma.so.1",)) -> None:
    """Libraries of the system that vLLM's CPU build is linked with; small images lack them."""
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError:
            raise InstallError(
                f"{name} is missing on this system, and vLLM's build for CPUs needs it: 'apt install libnuma1' or "
                "'dnf install numactl-libs', then run this again"
            ) from None


@contextmanager
def only_one_at_a_time():
    """``make demo`` and ``make test`` may start together; the second waits."""
    with (ROOT / ".venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def key() -> str:
    """Changes whenever an installation would: with the pins, the packaging and the place of the folder."""
    digest = hashlib.sha256(str(ROOT).encode())
    for name in ("requirements.toml", "setup.py", "pyproject.toml", "locks/cpu.txt", "locks/gpu.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()[:16]


def read_stamp() -> dict:
    """What is installed; empty when nothing is, or when it no longer fits."""
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if stamp.get("key") == key() and PYTHON.exists() else {}


def detect_hardware() -> str:
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return "gpu" if "GPU" in found else "cpu"


def make_venv() -> None:
    """Create the environment, or keep one that works."""
    if PYTHON.exists():
        probe = "import sys, pip; sys.exit(sys.version_info[:2] != (3, 12))"
        if subprocess.run([PYTHON, "-c", probe], capture_output=True).returncode == 0:
            return
        raise InstallError(f"{VENV} is not a working environment of Python 3.12: remove it and run this again")
    if Path(sys.prefix) != Path(sys.base_prefix):
        # An environment made out of an environment would depend on it; go back to the interpreter itself.
        base = Path(sys.base_prefix) / "bin" / "python3.12"
        run([base if base.exists() else sys.executable, "-m", "venv", VENV])
    else:
        venv.create(VENV, with_pip=True, symlinks=True)


def install(extras: list[str]) -> None:
    overrides = [override for extra in extras for override in PINS["overrides"].get(extra, ())]
    hardware = next((name for name in ("cpu", "gpu") if name in extras), None)
    locked = ["--constraint", str(LOCKS / f"{hardware}.txt")] if hardware else []
    later = [r for extra in extras for r in PINS["extras"][extra] if name_of(r) in PINS["compiled"]["packages"]]
    now = [r for r in requirements(extras) if r not in later]
    if have_uv():
        install_with_uv(now, overrides, *locked)
        if later:
            isolation = [f"--no-build-isolation-package={name}" for name in PINS["compiled"]["packages"]]
            with compiling():
                install_with_uv([*now, *later], overrides, *isolation, *locked)
    else:
        print("uv is not available; pip installs instead, which takes longer.", flush=True)
        install_with_pip(now, overrides, *locked)
        if later:
            with compiling():
                install_with_pip([*now, *later], overrides, "--no-build-isolation", *locked)
    # The project itself, whose requirements are there: resolving them again would undo the overrides.
    run([PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", ROOT])


def requirements(extras: list[str]) -> list[str]:
    """What the extras need, plus what builds the project."""
    shared = PINS["engine"] if {"cpu", "gpu"} & set(extras) else []
    own = [requirement for extra in extras for requirement in PINS["extras"][extra]]
    return [f"setuptools=={PINS['setuptools']}", *PINS["core"], *shared, *own]


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement)[0]).lower()


def have_uv() -> bool:
    command = [PYTHON, "-m", "pip", "install", "--quiet", f"uv=={PINS['uv']}"]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


def install_with_uv(wanted: list[str], overrides: list[str], *options: str) -> None:
    indexes, environment = uv_indexes()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(overrides) + "\n")
        file.flush()
        # Bytecode is made now: where Python may not write it later, every process compiles all that it imports again.
        command = [
            VENV / "bin" / "uv",
            "pip",
            "install",
            "--compile-bytecode",
            "--python",
            PYTHON,
            "--overrides",
            file.name,
        ]
        run([*command, *indexes, *options, *wanted], {**os.environ, **environment})


def uv_indexes() -> tuple[list[str], dict[str, str]]:
    """pip's settings in the words of uv: (options, environment variables). Settings made for uv itself win."""
    settings = pip_settings()
    options: list[str] = []
    if "index-url" in settings and not os.environ.get("UV_DEFAULT_INDEX"):
        options += ["--default-index", settings["index-url"].strip()]
    if "extra-index-url" in settings and not os.environ.get("UV_INDEX"):
        options += [word for url in settings["extra-index-url"].split() for word in ("--index", url)]
        options += ["--index-strategy", "unsafe-best-match"]  # pip looks at all indexes alike
    if "find-links" in settings and not os.environ.get("UV_FIND_LINKS"):
        options += [word for link in settings["find-links"].split() for word in ("--find-links", link)]
    for host in settings.get("trusted-host", "").split():
        options += ["--allow-insecure-host", host]
    environment = {"UV_HTTP_TIMEOUT": os.environ.get("UV_HTTP_TIMEOUT", "300")}
    if "cert" in settings and not os.environ.get("SSL_CERT_FILE"):
        environment["SSL_CERT_FILE"] = settings["cert"]
    return options, environment


def pip_settings() -> dict[str, str]:
    """pip's configuration from files and environment, by option; the environment wins."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        match = re.fullmatch(r"(?:global|install|:env:)\.([a-z-]+)='(.*)'", line.strip())
        if match:
            settings[match[1]] = match[2].replace("\\n", " ")
    return settings


def install_with_pip(wanted: list[str], overrides: list[str], *options: str) -> None:
    """What overrides do, without a resolver that knows them.

    The pinned packages come first, alone; then what they ask for, except where an override or a pin speaks; the
    overrides last, since a package further down may ask for something else.
    """
    pip = [PYTHON, "-m", "pip", "install", "--quiet", *options]
    spoken_for = {name_of(requirement) for requirement in [*wanted, *overrides]}
    run([*pip, "--no-deps", *wanted])
    listing = (
        "import importlib.metadata as m, json, sys\n"
        "from pip._vendor.packaging.requirements import Requirement\n"
        "needs = [(Requirement(line), set(Requirement(r).extras) or {''}) for r in sys.argv[1:]\n"
        "         for line in m.requires(Requirement(r).name) or ()]\n"
        "print(json.dumps([str(n).partition(';')[0].strip() for n, extras in needs\n"
        "                  if n.marker is None or any(n.marker.evaluate({'extra': e}) for e in extras)]))\n"
    )
    asked = subprocess.run([PYTHON, "-c", listing, *wanted], capture_output=True, text=True, check=True).stdout
    run([*pip, *(r for r in json.loads(asked) if name_of(r) not in spoken_for)])
    if overrides:
        run([*pip, "--no-deps", *overrides])


@contextmanager
def compiling():
    """Commands that compile write hundreds of lines. They go to a file, and a failure is one line with its cause."""
    global OUTPUT
    path = VENV / "compile.log"
    print(f"Compiling {', '.join(PINS['compiled']['packages'])}: minutes. The output is in {path}.", flush=True)
    try:
        with path.open("w") as OUTPUT:
            yield
    except InstallError as error:
        raise InstallError(compile_error(path.read_text(errors="replace"), path) or str(error)) from None
    finally:
        OUTPUT = None


def compile_error(output: str, path: Path) -> str:
    """The cause that the output of a compilation names, and its remedy; empty if there is no cause that is known."""
    missing = re.search(
        r"(?:fatal error|error): ['\"]?([\w./-]+\.(?:h|hpp|cuh))['\"]?(?::| file) ?(?:No such file|not found)", output
    )
    if missing:
        cause = f"the header {missing[1]} is missing on this machine"
    elif re.search(r"CUDA_HOME|CUDA not found|nvcc.*not found|Could not find (?:nvcc|CUDA)", output):
        cause = "no CUDA toolkit was found on this machine"
    else:
        return ""
    names = ", ".join(PINS["compiled"]["packages"])
    return (
        f"{names} cannot be compiled: {cause}. Load the module of a CUDA 13 toolkit with cuDNN headers, or set "
        f"CUDA_HOME to one, then run this again. All output is in {path}"
    )


def run(command: list, environment: dict[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    status = subprocess.run(words, cwd=ROOT, env=environment, stdout=OUTPUT, stderr=OUTPUT).returncode
    if status:
        where = "" if OUTPUT is None else f". Its output is in {OUTPUT.name}"
        raise InstallError(f"this command failed with status {status}: {shlex.join(words)}{where}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InstallError as error:
        sys.exit(f"tools/install.py: {error}")
