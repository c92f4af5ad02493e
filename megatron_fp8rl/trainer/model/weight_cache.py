"""Cache of quantized weights: quantized once per optimizer step, shared by all passes.

A copy is valid while the parameters are the same objects at the same tensor versions. Megatron-Core's distributed
optimizer writes weights through the flat parameter buffer, which changes no version: call :func:`clear_weight_caches`.
A cache whose weights have left their memory (:meth:`pin`) has the only copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_fp8rl.kernels.compat import num_writes

_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


class WeightCache:
    """The quantized weights of one linear, and whether delayed scaling has recorded their amax in this step."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self._made: Any = None
        self._is_pinned = False
        _caches.add(self)

    def get(self, weights: Sequence[Tensor], quantize: Callable[[], Any]) -> Any:
        """Return the cached result of ``quantize``; calls it if the weights have changed.

        Raises RuntimeError if neither weights nor a copy are in memory."""
        key = *map(id, weights), *num_writes(weights)
        if self._made is None or key != self._key:
            if self._is_pinned:
                raise RuntimeError(
                    "weights were changed or their FP8 copies dropped while gradients are in their memory; call "
                    "Optimizer.rebuild_parameters() first"
                )
            self._made = None  # free the old copy before making the new one
            self._made, self._key = quantize(), key
        return self._made

    def pin(self) -> None:
        """The weights leave their memory, until :meth:`renew`."""
        self._is_pinned = True

    def renew(self) -> None:
        self.clear()
        self._is_pinned = False

    def clear(self) -> None:
        self._made, self._key = None, ()


def clear_weight_caches() -> None:
    """Free the cached copies of all linears in this process; call after weights have changed or moved."""
    for cache in list(_caches):
        cache.clear()
