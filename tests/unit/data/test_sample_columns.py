"""Samples that travel as columns arrive as they were: shared rows once, numbers in place."""

import numpy as np
import pytest

from megatron_fp8rl.data.packing import divide
from megatron_fp8rl.data.sample_columns import SampleColumns
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer.messages import pack, unpack
from megatron_fp8rl.types import Sample, Segment
from tests.helpers.samples import advantages_of, logprobs_of, mask_of

PROMPT = TokenArray.from_ids(range(100))


def sample(number: int, *, experts: bool = False) -> Sample:
    """A shared prompt, an answer, a tool's output, and a segment that is too old to train."""
    answer = TokenArray.from_ids(range(number, number + 3)), TokenArray(np.float32([-0.25, -number, 0.0]))
    segments = (
        Segment(PROMPT),
        Segment(*answer, 0.5 - number, True),
        Segment(TokenArray.from_ids((7,))),
        Segment(*answer, 0.1),
    )
    routed = np.full((106, 2, 4), number, np.uint8) if experts else None
    return Sample(name=f"p#{number}", environment="e", segments=segments, staleness=number, routed_experts=routed)


@pytest.mark.parametrize("experts", [False, True])
def test_samples_are_what_they_were(experts):
    given = [sample(number, experts=experts) for number in range(5)]
    actual = SampleColumns.from_samples(given).samples()
    for one, other in zip(actual, given, strict=True):
        assert (one.name, one.environment, one.staleness) == (other.name, other.environment, other.staleness)
        assert one.token_ids == other.token_ids and logprobs_of(one) == logprobs_of(other)
        assert mask_of(one) == mask_of(other) and advantages_of(one) == advantages_of(other)
        assert (one.num_tokens, one.num_prompt_tokens, one.num_loss_tokens) == (107, 100, 3)
        assert [segment.rollout_logprobs is None for segment in one.segments] == [True, False, True, False]
        assert np.array_equal(one.routed_experts, other.routed_experts) if experts else one.routed_experts is None
    assert len({id(item.segments[0].token_ids) for item in actual}) == 1
    assert SampleColumns.from_samples([]).samples() == []
    without = Sample(name="sft", environment="e", segments=(Segment(PROMPT), Segment(PROMPT[:2], is_trained=True)))
    (again,) = SampleColumns.from_samples([without]).samples()
    assert again == without and again.num_prompt_tokens == 100


def test_a_message_of_a_share_is_its_columns_and_not_a_copy():
    given = [sample(number) for number in range(64)]
    first, second = (shares[0] for shares in divide(given, data_size=2, max_tokens=1000, alignment=1))
    message = pack(first)
    numbers = 4 * (100 + 32 * 3 * 2 + 32) + 4 * 32 * 3 * 2
    assert len(message) < 12 and numbers < sum(part.numel() for part in message) < numbers + 8000
    actual = unpack(message)
    assert actual == first and actual != second
    received = {part.numpy().ctypes.data: part.numel() for part in message}
    row = np.asarray(actual.microbatches[0][0].segments[1].rollout_logprobs).ctypes.data
    assert any(start <= row < start + size for start, size in received.items())
