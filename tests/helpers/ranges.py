"""Versions that patches were not tested with, pretended."""

import os
from dataclasses import replace

from megatron_fp8rl import upstream


def leave_range(*packages: str, set_attribute=setattr) -> None:
    """In this process, put the installed versions of ``packages`` outside the range of every optional patch."""
    os.environ.pop(upstream.GO_ON, None)  # it applies every patch
    patches = tuple(
        replace(patch, versions="<0.1") if patch.optional and patch.package in packages else patch
        for patch in upstream.registered()
    )
    set_attribute(upstream, "registered", lambda: patches)
    upstream._applies.cache_clear()
