"""One package for the programs beside the library: ``megatron_fp8rl_programs.launch`` is the module ``launch``.

An installed wheel has ``launch``, ``checkpoint_tools`` and ``model_configs`` only inside this package, because such
common names could collide in site-packages. Importing this package makes them importable under both names, as the same
modules. In a checkout it changes nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent
NAMES = ("checkpoint_tools", "launch", "model_configs")


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``megatron_fp8rl_programs.X`` is the module ``X``, loaded once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, short = name.partition(".")
        if package != __name__ or short.partition(".")[0] not in NAMES:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(spec.name.partition(".")[2])
        spec.loader_state = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just overwritten them; the module was executed under its own name.
        module.__spec__, module.__loader__ = module.__spec__.loader_state


def library() -> int:
    """The console script ``megatron-fp8rl``."""
    _add_current_folder()
    from megatron_fp8rl.__main__ import main

    return main()


def launcher() -> int:
    """The console script ``megatron-fp8rl-launch``."""
    _add_current_folder()
    from launch.cli import main

    return main()


def _add_current_folder() -> None:
    """Make modules of the current folder importable, such as a configuration, as with ``python -m``."""
    sys.path.insert(0, os.getcwd())


def checkpoints() -> int:
    """The console script ``megatron-fp8rl-checkpoints``."""
    from checkpoint_tools.__main__ import main

    return main()


if (FOLDER / "launch").is_dir() and str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
sys.meta_path.insert(0, _Alias())
