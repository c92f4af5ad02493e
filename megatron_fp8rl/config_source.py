"""Python source of a configuration, as a file with one function that returns it."""

import dataclasses
import re

from megatron_fp8rl.config import RunConfig


def as_function(cfg: RunConfig) -> str:
    """A Python file with one function that returns ``cfg``: what differs from the defaults."""
    used: set[str] = set()
    body = _source(cfg, used, indent=1)
    name = re.sub(r"\W+", "_", cfg.name).strip("_").lower() or "run"
    name = name if not name[0].isdigit() else f"run_{name}"
    names = ", ".join(sorted(used))
    imports = f"from megatron_fp8rl.config import {names}"
    if len(imports) > 120:
        imports = "from megatron_fp8rl.config import (\n" + "".join(f"    {cls},\n" for cls in sorted(used)) + ")"
    return f"{imports}\n\n\ndef {name}() -> RunConfig:\n    return {body}"


def _source(value: object, used: set[str], indent: int) -> str:
    """Python source of a configuration; fields at their defaults are left out."""
    if dataclasses.is_dataclass(value):
        used.add(type(value).__name__)
        pad, lines = "    " * (indent + 1), []
        for field in dataclasses.fields(value):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            current = getattr(value, field.name)
            if current != default:
                lines.append(f"{pad}{field.name}={_source(current, used, indent + 1)},\n")
        return f"{type(value).__name__}(\n{''.join(lines)}{'    ' * indent})" if lines else f"{type(value).__name__}()"
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        pad = "    " * (indent + 1)
        return "(\n" + "".join(f"{pad}{_source(item, used, indent + 1)},\n" for item in value) + "    " * indent + ")"
    return repr(value)
