"""Set fields of engines and sampling without naming their sections."""

from dataclasses import replace
from typing import Any

from megatron_fp8rl.config import RunConfig

SECTIONS = ("engine", "sampling", "weight_sync")


def set_fields(cfg: RunConfig, **fields: Any) -> RunConfig:
    """``cfg`` with each field set in the section of engines, sampling or weight updates that has it."""
    for name, value in fields.items():
        (section,) = (each for each in SECTIONS if hasattr(getattr(cfg, each), name))
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{name: value})})
    return cfg


def options(text: str) -> dict[str, str]:
    """Command-line options with one value each."""
    args = text.split()
    return dict(zip(args[::2], args[1::2], strict=True))
