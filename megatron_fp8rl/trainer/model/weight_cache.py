"""FP8 copies of weights, made once per optimizer step and shared by all passes until the weights change.

A copy is used while the parameters are the same objects at the same versions. Megatron-Core's distributed optimizer
writes new weights through the flat buffer behind the parameters, which no version counts: whoever updates weights that
way calls :func:`forget_quantized_weights`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from megatron_fp8rl.kernels.compat import num_writes

_caches: weakref.WeakSet[WeightCache] = weakref.WeakSet()


class WeightCache:
    """The quantized weights of one linear, and whether delayed scaling has their magnitude for this step."""

    def __init__(self) -> None:
        self._key: tuple = ()
        self._made: Any = None
        _caches.add(self)

    def get(self, weights: Sequence[Tensor], quantize: Callable[[], Any]) -> Any:
        """What ``quantize`` returned for these weights; it is called when they have changed since."""
        key = tuple((id(weight), num_writes(weight)) for weight in weights)
        if self._made is None or key != self._key:
            self._made = None  # before the new copy is made, so that there are never two
            self._made, self._key = quantize(), key
        return self._made

    def clear(self) -> None:
        self._made, self._key = None, ()


def forget_quantized_weights() -> None:
    """Drop the copies of all linears of this process and their memory; call when weights have changed or moved."""
    for cache in list(_caches):
        cache.clear()
