"""Packaging of what pyproject.toml cannot state: versions from requirements.toml, and where packages are."""

import re
import sys
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PINS = tomllib.loads((ROOT / "requirements.toml").read_text())
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_fp8rl" / "__init__.py").read_text())[1]

PARENT = "megatron_fp8rl_programs"
packages = find_packages(include=["megatron_fp8rl", "megatron_fp8rl.*", PARENT])
programs = find_packages(include=["model_configs", "checkpoint_tools", "launch", "launch.*"])
# Short names could collide with other packages in site-packages. An editable installation finds them in the checkout.
inside = {} if "editable_wheel" in sys.argv else {f"{PARENT}.{name}": name.replace(".", "/") for name in programs}

setup(
    version=VERSION,
    python_requires=f"=={PINS['python']}.*",
    packages=[*packages, *(inside or programs)],
    package_dir=inside,
    package_data={
        "megatron_fp8rl": ["README.md", "py.typed"],
        "megatron_fp8rl.kernels": ["README.md", "*.c", "*.h"],
        "megatron_fp8rl.preflight": ["rates.toml"],
        "megatron_fp8rl.kernels.cuda": ["*"],
    },
    install_requires=PINS["core"],
    # Trainer and engines need overrides, which pip does not know: `make install` installs them.
    extras_require={name: PINS["extras"][name] for name in ("launch", "test")},
)
