"""FP8 primary weights (``precision.params = "fp8"``): FP8 linears without a BF16 copy of their weights.

In: a model whose weights are loaded, before it has gradient buffers. Out: the same model, in which every FP8 linear has
parameters that are FP8 themselves (``kernels/fp8_parameter.py``). Runs on every trainer rank; no communication.

From there on Megatron-Core and Transformer Engine see to them. A parameter's bytes lie in a uint8 buffer. After a step
the FP32 master weights, of which each data-parallel rank has a part, are rounded to BF16 and quantized straight into
it: the largest magnitudes of blocks are reduced over the ranks first, so that all have the same scales, and what is
gathered are FP8 bytes. Bytes and scales are those of ``quantize_weight`` for the BF16 parameter that there is not.

Transformer Engine rounds all the masters that it is given before it quantizes the first: 2 bytes for each, as many as
FP8 parameters save on one rank. :func:`few_masters_at_a_time` has it do so in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from torch import nn

from megatron_fp8rl.precision.recipes import Blockwise
from megatron_fp8rl.trainer.compat.megatron import begin_with, quantized_in_groups
from megatron_fp8rl.trainer.model.build import named_linears
from megatron_fp8rl.trainer.parallel import Parallel

_MASTERS_AT_A_TIME = 2**24  # elements: 32 MiB in BF16, and one reduction of largest magnitudes


def quantize_parameters(models: Sequence[nn.Module], parallel: Parallel) -> None:
    """Make the weights of all FP8 linears of this rank FP8 themselves. Their BF16 values wait in host memory until the
    optimizer has made its FP32 master weights from them.

    Raises ValueError for a linear that cannot keep its weights so, by name.
    """
    for names, linear in named_linears(models, parallel):
        if linear.recipe is None:
            continue
        if linear.block_rows is not None:  # more tensor-parallel ranks than groups of heads may divide blocks
            raise ValueError(
                f"precision.params = 'fp8': {names[0]} mixes heads of queries, keys and values in its blocks, which the "
                "engine's blocks do not. Choose --precision.params bf16"
            )
        for name, parameter in list(linear.named_parameters(recurse=False)):
            if parameter.ndim == 2:
                setattr(linear, name, _fp8_parameter(parameter, linear.recipe))


def few_masters_at_a_time() -> AbstractContextManager[None]:
    """Inside, Megatron-Core's optimizer has its master weights rounded to BF16 and quantized some at a time.

    Collective over the ranks that divide the masters, once for each group of parameters; all form the same groups.
    It keeps peaks low, and changes no value.
    """
    return quantized_in_groups(_groups)


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Consecutive tensors of ``sizes`` elements, together as many as are rounded at a time, or one that is larger."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > _MASTERS_AT_A_TIME:
            yield slice(start, index)
            start, total = index, 0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def _fp8_parameter(parameter: nn.Parameter, recipe: Blockwise) -> nn.Parameter:
    """A parameter that is FP8, with the attributes by which Megatron-Core knows how it is divided."""
    from megatron_fp8rl.trainer.model.linear_te import fp8_tensor  # imports Transformer Engine

    made = nn.Parameter(fp8_tensor(parameter, recipe), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(made, name, value)
    begin_with(made, parameter.detach().to("cpu", copy=True))
    return made
