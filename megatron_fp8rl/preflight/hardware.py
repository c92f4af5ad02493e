"""The GPUs that a run is meant for, which need not be those of the machine that the doctor runs on. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_fp8rl.precision.hardware import Generation

GIB = 1 << 30
GpuName = Literal["h100", "h200", "b200"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU."""

    name: GpuName
    generation: Generation
    memory_bytes: int  # that CUDA reports as total; what is printed on the box is more

    @property
    def fp8_weight_copies(self) -> int:
        """FP8 copies of a weight that Transformer Engine keeps under per-tensor scales.

        Hopper multiplies FP8 only with both operands K-major, so backward needs the transpose; Blackwell does not.
        Blockwise and MXFP8 scales need a second copy everywhere: transposed blocks have scales of their own.
        """
        return 1 if self.generation == "blackwell" else 2


# torch.cuda.get_device_properties(0).total_memory of an H100 SXM 80 GB, an H200 SXM 141 GB and a B200 180 GB.
GPUS: dict[str, Gpu] = {
    "h100": Gpu(name="h100", generation="hopper", memory_bytes=int(79.1 * GIB)),
    "h200": Gpu(name="h200", generation="hopper", memory_bytes=int(139.8 * GIB)),
    "b200": Gpu(name="b200", generation="blackwell", memory_bytes=int(178.3 * GIB)),
}
