"""FP8 primary weights (``precision.params = "fp8"``): FP8 linears without BF16 weights.

Convert a model with loaded weights before it has gradient buffers; Megatron-Core and Transformer Engine then manage its
FP8 parameters (``kernels/fp8_parameter.py``), whose data is in a uint8 buffer. After a step the FP32 master weights,
sharded over data-parallel ranks, are rounded to BF16 and quantized directly into the buffer. Block amax values are
first reduced over the ranks, so that all use the same scales; the all-gather moves FP8 bytes. Data and scales equal
``quantize_weight`` of a BF16 parameter.

Transformer Engine rounds all masters of a call to BF16 before quantizing the first: 2 bytes each, as much as FP8
parameters save on one rank. :func:`limit_master_copies` calls it in chunks.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from megatron_fp8rl import upstream
from megatron_fp8rl.precision.recipes import Blockwise
from megatron_fp8rl.trainer.compat.megatron import quantized_in_groups, set_initial_values
from megatron_fp8rl.trainer.model.build import named_linears
from megatron_fp8rl.trainer.parallel import Parallel

_MASTERS_AT_A_TIME = 2**24  # elements: 32 MiB in BF16, and one amax reduction


def quantize_parameters(models: Sequence[nn.Module], parallel: Parallel) -> None:
    """Convert the weights of all FP8 linears on this rank to FP8 parameters; no communication.

    The optimizer creates its FP32 master weights from their BF16 values, kept in host memory until then. Raises
    ValueError if a linear does not support FP8 parameters.
    """
    for names, linear in named_linears(models, parallel):
        if linear.recipe is None:
            continue
        if linear.block_rows is not None:  # more TP ranks than head groups may split blocks
            raise ValueError(
                f"precision.params = 'fp8': {names[0]} has FP8 blocks that span q, k and v heads, unlike the engine's "
                "blocks. Choose --precision.params bf16"
            )
        for name, parameter in list(linear.named_parameters(recurse=False)):
            if parameter.ndim == 2:
                setattr(linear, name, _fp8_parameter(parameter, linear.recipe))


def limit_master_copies() -> AbstractContextManager[None]:
    """In the block, Megatron-Core's optimizer rounds master weights to BF16 and quantizes them in groups. Collective
    over the ranks that shard the masters, once per group; all ranks form the same groups. Changes no value."""
    return quantized_in_groups(consecutive) if upstream.applies("quantized_in_groups") else nullcontext()


def consecutive(sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of consecutive tensors of ``sizes`` elements, each up to the limit in total, or one larger tensor."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > _MASTERS_AT_A_TIME:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _fp8_parameter(parameter: nn.Parameter, recipe: Blockwise) -> nn.Parameter:
    """Convert to an FP8 parameter, with the attributes that tell Megatron-Core how it is sharded."""
    from megatron_fp8rl.trainer.model.linear_te import fp8_tensor  # imports Transformer Engine

    made = nn.Parameter(fp8_tensor(parameter, recipe), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(made, name, value)
    set_initial_values(made, parameter.detach().to("cpu", copy=True))
    return made
