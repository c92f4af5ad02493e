"""What Triton compiles in a process is recorded, and goes to memory when the disk is full."""

import os
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from megatron_fp8rl import upstream
from megatron_fp8rl.kernels.compile_cache import in_memory, note
from megatron_fp8rl.upstream import patches


@patches(
    "torch",
    why="Triton, which PyTorch pins, raises OSError when the disk is full; kernels go to memory instead, and cost time",
    remove_when="Triton compiles without a cache when it cannot write one",
    optional=True,
)
class CacheWithSpare(FileCacheManager):
    """One kernel's files. After the first error, all further files of the kernel are in memory."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        try:
            super().__init__(key, override, dump)
        except OSError:
            self.key = key
            self._use_spare()

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        try:
            return super().put(data, filename, binary)
        except OSError:
            self._use_spare()
            return super().put(data, filename, binary)

    def _use_spare(self) -> None:
        self.cache_dir = os.path.join(in_memory(), "triton", self.key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


def watch() -> None:
    """Record the kernels that Triton compiles in this process, and compile to memory when its folder is full."""

    def listen(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            note("triton", getattr(src, "name", "?"), times.total / 1e6)

    knobs.compilation.listener = listen
    if upstream.applies("CacheWithSpare"):
        knobs.cache.manager_class = CacheWithSpare
