"""Packing over random samples: nothing lost, nothing doubled, everything aligned, ranks in balance."""

import random
from dataclasses import replace
from math import ceil

import numpy as np
import pytest

from megatron_fp8rl.config import ParallelConfig
from megatron_fp8rl.data.packing import Alignment, SequenceTooLongError, assign, pack
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Sample
from tests.helpers.samples import advantages_of, logprobs_of, make_sample, mask_of


def draw_sample(rng: random.Random, index: int, *, longest: int = 30, experts: tuple[int, int] | None = None) -> Sample:
    """Values encode (sample, position), so that a token out of place shows."""
    num_prompt, num_completion = rng.randint(1, longest), rng.randint(1, longest)
    num = num_prompt + num_completion
    ids = [1000 * (index + 1) + i for i in range(num)]
    return make_sample(
        f"env/{index}#0",
        f"env{index % 3}",
        prompt=ids[:num_prompt],
        completion=ids[num_prompt:],
        logprobs=[-float(index) - i / 64 for i in range(num_completion)],
        mask=[True, *(rng.random() < 0.8 for _ in range(num_completion - 1))],
        advantages=[index + i / 64 for i in range(num_completion)],
        routed_experts=None if experts is None else np.full((num - 1, *experts), index % 50, dtype=np.uint8),
    )


def check_microbatch(mb, by_name, alignment: Alignment, max_tokens: int) -> list[str]:
    """Compare every position of every sequence with its sample; return the names."""
    total = len(mb.tokens_T)
    assert total % alignment.microbatch == 0 and total <= max_tokens
    starts = mb.cu_seqlens_S.tolist()
    assert starts[0] == 0 and starts[-1] == total and len(mb.names) == len(mb.environments) == len(starts) - 1
    for s, name in enumerate(mb.names):
        low, high = starts[s], starts[s + 1]
        assert (high - low) % alignment.sequence == 0
        assert mb.positions_T[low:high].tolist() == list(range(high - low))
        assert set(mb.sequence_ids_T[low:high].tolist()) == {s}
        if not name:
            assert not mb.loss_mask_T[low:high].any() and (mb.completion_positions_T[low:high] == -1).all()
            continue
        sample = by_name[name]
        num = sample.num_tokens
        last = low + num - 1
        assert mb.environments[s] == sample.environment
        assert mb.tokens_T[low : low + num].tolist() == list(sample.token_ids)
        assert mb.targets_T[low:last].tolist() == list(sample.token_ids[1:])
        assert mb.loss_mask_T[low:high].tolist() == [*mask_of(sample)[1:], *[False] * (high - last)]
        assert mb.rollout_logprobs_T[low:last].tolist() == logprobs_of(sample)[1:]
        assert mb.advantages_T[low:last].tolist() == advantages_of(sample)[1:]
        expected = [max(t + 1 - sample.num_prompt_tokens, -1) for t in range(num - 1)]
        assert mb.completion_positions_T[low:high].tolist() == expected + [-1] * (high - last)
        if sample.routed_experts is not None:
            assert (mb.routed_experts_T[low:last].numpy() == sample.routed_experts).all()
            assert (mb.routed_experts_T[last:high] == -1).all()
    return [name for name in mb.names if name]


@pytest.mark.parametrize("seed", range(25))
def test_every_token_exactly_once_and_in_place(seed):
    rng = random.Random(seed)
    parallel = ParallelConfig(tensor=rng.choice([1, 2]), context=rng.choice([1, 2]))
    alignment = rng.choice([Alignment.of(parallel), Alignment(sequence=rng.choice([1, 4]), microbatch=4)])
    experts = rng.choice([None, (2, 4)])
    samples = [draw_sample(rng, i, experts=experts) for i in range(rng.randint(1, 40))]
    data_size, multiple, num_updates = rng.choice([1, 2, 3]), rng.choice([1, 2, 4]), rng.choice([1, 1, 3])
    options = dict(
        data_size=data_size,
        max_tokens=rng.choice([64, 100, 400]),
        alignment=alignment,
        num_microbatches_multiple=multiple,
        num_updates=num_updates,
    )
    ranks = [pack(samples, data_rank=rank, **options) for rank in range(data_size)]
    by_name = {sample.name: sample for sample in samples}
    assert {len(batches) for batches in ranks} == {min(num_updates, len(samples))}
    seen: list[str] = []
    for update in zip(*ranks, strict=True):
        assert len({len(batch.microbatches) for batch in update}) == 1
        assert len(update[0].microbatches) % multiple == 0
        names = [
            name
            for batch in update
            for mb in batch.microbatches
            for name in check_microbatch(mb, by_name, alignment, options["max_tokens"])
        ]
        loss_tokens = sum(int(mb.loss_mask_T.sum()) for batch in update for mb in batch.microbatches)
        assert {(batch.num_loss_tokens, batch.num_sequences) for batch in update} == {(loss_tokens, len(names))}
        seen += names
    assert sorted(seen) == sorted(by_name)


def test_updates_are_consecutive_parts():
    samples = [draw_sample(random.Random(i), i) for i in range(10)]
    batches = pack(samples, data_size=1, data_rank=0, max_tokens=200, alignment=1, num_updates=3)
    parts = [sorted(int(n[4:-2]) for mb in batch.microbatches for n in mb.names if n) for batch in batches]
    assert parts == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]


def test_no_samples_give_no_updates():
    assert pack([], data_size=2, data_rank=1, max_tokens=64, alignment=4, num_updates=2) == ()


def test_ranks_and_microbatches_are_balanced():
    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(16, 512) for _ in range(300)]
        ranks = assign(lengths, data_size=4, capacity=2048)
        loads = [[sum(lengths[i] for i in chosen) for chosen in rank] for rank in ranks]
        assert max(max(rank) for rank in loads) <= 2048
        # Within 5 % of an equal share: 300 sequences of at most a quarter of a microbatch leave the rule much choice.
        assert max(map(sum, loads)) <= 1.05 * sum(lengths) / 4
        assert len(ranks[0]) <= ceil(sum(lengths) / (4 * 2048)) + 1


@pytest.mark.parametrize("parallel", [{}, {"tensor": 2}, {"context": 2}], ids=str)
def test_ranks_that_gather_tokens_have_equally_many(parallel):
    """Fillers are separate sequences; the last rank here has no sample."""
    rng = random.Random(7)
    alignment = Alignment.of(ParallelConfig(**parallel))
    samples = [draw_sample(rng, i) for i in range(9)]
    by_name = {sample.name: sample for sample in samples}
    how = {"data_size": 4, "max_tokens": 256, "alignment": alignment}
    plain = [pack(samples, data_rank=rank, **how)[0].microbatches for rank in range(4)]
    equal = [pack(samples, data_rank=rank, equal_lengths=True, **how)[0].microbatches for rank in range(4)]
    for group, before in zip(zip(*equal, strict=True), zip(*plain, strict=True), strict=True):
        assert {len(mb.tokens_T) for mb in group} == {max(len(mb.tokens_T) for mb in before)}
    names = [name for rank in equal for mb in rank for name in check_microbatch(mb, by_name, alignment, 256) if name]
    assert sorted(names) == sorted(by_name)
    (alone,) = pack(samples[:1], data_rank=3, equal_lengths=True, **how)
    assert set(alone.microbatches[0].names) == {""} and not alone.microbatches[0].loss_mask_T.any()


def test_padding_only_where_alignment_asks():
    alignment = Alignment.of(ParallelConfig(world_size=8, tensor=2, context=2))
    assert alignment == Alignment(sequence=4, microbatch=64)
    assert Alignment.of(ParallelConfig()) == Alignment(sequence=1, microbatch=16)
    samples = [draw_sample(random.Random(i), i) for i in range(20)]
    (batch,) = pack(samples, data_size=1, data_rank=0, max_tokens=1 << 14, alignment=Alignment.of(ParallelConfig()))
    (mb,) = batch.microbatches
    assert len(mb.tokens_T) == 16 * ceil(sum(len(s.token_ids) for s in samples) / 16)


def test_a_sequence_too_long_is_refused_by_name():
    samples = [draw_sample(random.Random(i), i) for i in range(5)]
    longest = max(samples, key=lambda s: len(s.token_ids))
    with pytest.raises(SequenceTooLongError, match=rf"{longest.name} has {len(longest.token_ids)} tokens.*Raise optim"):
        pack(samples, data_size=1, data_rank=0, max_tokens=len(longest.token_ids) - 1, alignment=1)
    assert pack(samples, data_size=1, data_rank=0, max_tokens=len(longest.token_ids), alignment=1)


def test_inconsistent_samples_are_refused_by_name():
    def packed(sample, *others):
        return pack([sample, *others], data_size=1, data_rank=0, max_tokens=256, alignment=1)

    good = draw_sample(random.Random(0), 0)
    prompt, sampled, *_ = good.segments
    with pytest.raises(ValueError, match="env/0#0: 1 log-probabilities for 2 sampled tokens"):
        packed(replace(good, segments=(prompt, sampled._replace(token_ids=TokenArray.from_ids((1, 2))))))
    for first in (sampled, sampled._replace(is_trained=False), prompt._replace(is_trained=True)):
        with pytest.raises(ValueError, match="env/0#0: the prompt is empty"):
            packed(replace(good, segments=(first, sampled)))
    routed = draw_sample(random.Random(1), 1, experts=(2, 4))
    with pytest.raises(ValueError, match="env/0#0: routed experts of shape None"):
        packed(good, routed)
