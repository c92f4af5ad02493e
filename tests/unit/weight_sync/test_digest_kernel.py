"""The digest kernel in Triton's interpreter, against digest.py's own sums. Runs itself in a process of its own, for the
interpreter has to be chosen before Triton is imported."""

import pytest
import torch

from megatron_fp8rl.weight_sync import digest
from tests.helpers.interpreter import assert_passes_interpreted, in_interpreter, starts_interpreter


@pytest.mark.slow
@starts_interpreter
def test_in_the_interpreter():
    assert_passes_interpreted(__file__, says="1 skipped", deadline_s=240.0)


def by_kernel(tensors: list[torch.Tensor]) -> list[str]:
    from megatron_fp8rl.kernels.triton import digest_tensors

    # The interpreter reports that 64-bit products wrap, which is what they are for.
    return digest._lines(digest._finish(digest_tensors.sums(tensors), tensors)).split()


@in_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_sums_of_every_length_near_words_tiles_and_chunks():
    generator = torch.Generator().manual_seed(1)
    lengths = [0, 1, 7, 8, 9, 15, 16, 1000, 8 * 1024 - 1, 8 * 1024, 8 * 1024 + 3]
    lengths += [8 * 16384 + extra for extra in (-8, -1, 0, 1, 8)] + [8 * 16384 * 3 + 5]
    tensors = [torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8) for n in lengths]
    assert by_kernel(tensors) == digest.digests(tensors)


@in_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_dtypes_and_views_that_begin_anywhere():
    generator = torch.Generator().manual_seed(2)
    buffer = torch.randint(0, 256, (40_000,), generator=generator, dtype=torch.uint8)
    tensors = [
        torch.randn(33, 129, generator=generator).bfloat16(),
        torch.randn(5, 7, generator=generator),
        torch.randn(128, 64, generator=generator).to(torch.float8_e4m3fn),
        buffer[3:20_000],
        buffer[8:20_000],
        torch.zeros(100, dtype=torch.int64),
        torch.full((9,), -1, dtype=torch.int64),
    ]
    assert by_kernel(tensors) == digest.digests(tensors)


@in_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_prepared_sums_follow_the_content_of_the_memory():
    from megatron_fp8rl.kernels.triton import digest_tensors

    generator = torch.Generator().manual_seed(3)
    scales = torch.randn(61, 33, generator=generator)
    weights = torch.randn(64, 129, generator=generator).bfloat16()
    tensors = [
        scales,
        scales[7:9],  # begins between words of 8 bytes
        scales[:, 3:8],  # rows lie apart
        scales.t(),
        torch.randn(20_011, generator=generator),
        weights,
        weights[:, :64],
        weights[3:5],
        weights[:0],
        scales[:0],
    ]
    sums = digest_tensors.prepare(tensors, widen=True)
    for _ in range(3):
        wide = [digest.widened(tensor) for tensor in tensors]
        assert digest._lines(digest._finish(sums().tolist(), wide)).split() == digest.digests(wide)
        scales.mul_(-1.5)
        weights[3].add_(1)
    assert digest_tensors.sums([]) == []
