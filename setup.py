"""Packaging. Versions come from requirements.toml; settings of tools from pyproject.toml."""

import re
import sys
import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PINS = tomllib.loads((ROOT / "requirements.toml").read_text())
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "megatron_fp8rl" / "__init__.py").read_text())[1]


PROGRAMS = ["model_configs", "checkpoint_tools", "launch", "launch.*"]
HOME = "megatron_fp8rl_programs"
packages = find_packages(include=["megatron_fp8rl", "megatron_fp8rl.*", HOME])
programs = find_packages(include=PROGRAMS)
# Short names would collide with others' in site-packages; an editable installation finds them in the checkout.
inside = {} if "editable_wheel" in sys.argv else {f"{HOME}.{name}": name.replace(".", "/") for name in programs}

setup(
    name="megatron-fp8rl",
    version=VERSION,
    description="FP8 reinforcement learning for dense and mixture-of-experts language models",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=f"=={PINS['python']}.*",
    packages=[*packages, *(inside or programs)],
    package_dir=inside,
    package_data={
        "megatron_fp8rl": ["README.md"],
        "megatron_fp8rl.kernels": ["README.md"],
        "megatron_fp8rl.kernels.cuda": ["*"],
    },
    install_requires=PINS["core"],
    # Trainer and engines need overrides, which pip does not know: `make install` installs them.
    extras_require={name: PINS["extras"][name] for name in ("launch", "test")},
    entry_points={
        "console_scripts": [
            f"megatron-fp8rl = {HOME}:library",
            f"megatron-fp8rl-launch = {HOME}:launcher",
            f"megatron-fp8rl-checkpoints = {HOME}:checkpoints",
        ],
        "vllm.general_plugins": ["megatron_fp8rl = megatron_fp8rl.rollout.vllm_plugin.plugin:register"],
    },
)
