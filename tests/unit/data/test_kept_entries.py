"""Kept entries against sets of ids: through bytes, columns of samples, packing, files and reports."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from megatron_fp8rl.algo.samples import KeptEntriesError, require_kept
from megatron_fp8rl.config import SamplingConfig
from megatron_fp8rl.data.packing import divide, pack
from megatron_fp8rl.data.sample_columns import SampleColumns
from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.observe.groups import group_metrics
from megatron_fp8rl.observe.recording import RolloutWriter, read_steps
from megatron_fp8rl.rollout.completions import Answer, PartialCompletion, read_answer, write_answer
from megatron_fp8rl.rollout.completions import Segment as Answered
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import Context, RolloutGroup, Sample, Segment, Trajectory, single_turn
from model_configs.tiny import tiny_qwen3
from tests.helpers.rollouts import make_group

VOCAB = 200  # 7 words: up to 6 ids, or a mask
ALL = frozenset(range(VOCAB))


def drawn(num_tokens: int, seed: int = 0) -> list[frozenset[int]]:
    rng = np.random.default_rng(seed)
    counts = [1, 6, 7, VOCAB - 1, VOCAB, 2][seed:] + rng.integers(1, VOCAB, num_tokens).tolist()
    return [frozenset(rng.permutation(VOCAB)[:count].tolist()) for count in counts[:num_tokens]]


def of(sets: list[frozenset[int]]) -> KeptEntries:
    masks = np.array([[token in kept for token in range(-(-VOCAB // 32) * 32)] for kept in sets]).reshape(-1, 224)
    return KeptEntries.from_bits(np.packbits(masks, axis=1, bitorder="little"), VOCAB)


def sets_of(kept: KeptEntries) -> list[frozenset[int]]:
    every = [kept.contain(np.full(len(kept), token)) for token in range(VOCAB)]
    return [frozenset(np.flatnonzero(column).tolist()) for column in np.array(every).reshape(VOCAB, -1).T]


def test_each_token_takes_ids_or_a_mask_whichever_is_smaller():
    sets = drawn(30)
    kept = of(sets)
    assert kept.lengths[:6].tolist() == [1, 6, 7, 7, 0, 2] and kept.lengths.max() == 7
    assert kept.words[:7].tolist() == sorted(sets[0]) + sorted(sets[1])
    assert sets_of(kept) == sets and kept.counts().tolist() == list(map(len, sets))
    assert KeptEntries.from_bytes(kept.to_bytes()) == kept != of(sets[1:])
    assert sets_of(kept[3:11]) == sets[3:11] and len(kept[5:5]) == 0
    assert sets_of(kept.select(np.array([9, 2, 2, 0]))) == [sets[9], sets[2], sets[2], sets[0]]
    joined = KeptEntries.join([kept[:4], None, kept[4:]], [4, 2, 26])
    assert sets_of(joined) == [*sets[:4], ALL, ALL, *sets[4:]]
    assert KeptEntries.join([None, None], [1, 2]) is None
    with pytest.raises(ValueError, match=r"kept entries of \[4\] tokens, expected \[5\]"):
        KeptEntries.join([kept[:4]], [5])


def test_interrupted_answers_and_stop_strings():
    """Kept entries of the pieces of a completion, each through an answer's bytes, cut with its tokens."""
    sets, part = drawn(5), PartialCompletion(seed=1)
    for tokens, kept, reason in (([1, 2], of(sets[:2]), "abort"), ([3, 4, 5], of(sets[2:]), "length")):
        segment = Answered(
            token_ids=tokens,
            rollout_logprobs=[-1.0] * len(tokens),
            finish_reason=reason,
            routed_experts=None,
            kept=kept,
        )
        (read,) = read_answer(write_answer(Answer(segments=[segment]))).segments
        part.extend(read, version=3, give_up=False)
    whole = part.complete(lambda ids: "".join(map(chr, ids)), ())
    assert sets_of(whole.kept) == sets
    cut = part.complete(lambda ids: "".join(map(chr, ids)), ("\x03",))
    assert cut.token_ids == (1, 2, 3) and sets_of(cut.kept) == sets[:3]
    with pytest.raises(ValueError, match="kept entries of 5 tokens for 2 tokens"):
        wrong = replace(segment, token_ids=[1, 2], rollout_logprobs=[0, 0], kept=of(sets))
        read_answer(write_answer(Answer(segments=[wrong])))


def sample(number: int, sets: list[frozenset[int]]) -> Sample:
    """A prompt of three tokens, an answer, a tool's output of two, and an answer from the whole vocabulary."""
    ids = TokenArray.from_ids(range(len(sets)))
    logprobs = TokenArray(np.full(len(sets), -1, np.float32))
    segments = (
        Segment(TokenArray.from_ids((1, 2, 3))),
        Segment(ids, logprobs, 1.0, True, of(sets)),
        Segment(TokenArray.from_ids((4, 5))),
        Segment(ids[:1], logprobs[:1], 1.0, True),
    )
    return Sample(name=f"p#{number}", environment="e", segments=segments)


def test_samples_travel_with_their_entries_and_are_packed_in_place():
    all_sets = [drawn(number + 2, number) for number in range(5)]
    samples = SampleColumns.from_samples([sample(n, sets) for n, sets in enumerate(all_sets)]).samples()
    for sent, sets in zip(samples, all_sets, strict=True):
        assert [s.kept is None for s in sent.segments] == [True, False, True, False]
        assert sets_of(sent.segments[1].kept) == sets and sets_of(sent.segments[3].kept) == [ALL]
    seen = 0
    (batch,) = pack(samples, data_size=1, data_rank=0, max_tokens=32, alignment=4)
    for mb in batch.microbatches:
        actual, expected = sets_of(mb.kept), [ALL] * len(mb.tokens_T)
        for name, start in zip(mb.names, mb.cu_seqlens_S.tolist()):
            sets = all_sets[int(name[2:])]
            expected[start + 2 : start + 2 + len(sets)] = sets  # position 2 predicts the first sampled token
            seen += 1
        assert actual == expected
    assert seen == 5
    untruncated = replace(samples[0], segments=(samples[0].segments[0], samples[0].segments[1]._replace(kept=None)))
    (whole,) = pack([untruncated], data_size=1, data_rank=0, max_tokens=32, alignment=4)
    assert whole.microbatches[0].kept is None
    prompt, answer, *_ = samples[1].segments
    wrong = replace(samples[1], segments=(prompt, answer._replace(kept=of(all_sets[0]))))
    with pytest.raises(ValueError, match="p#1: kept entries of 2 tokens for 3 sampled tokens"):
        divide([wrong], data_size=1, max_tokens=32, alignment=4)


def recorded_group() -> RolloutGroup:
    """Rollouts of one turn and of two turns. The last turn was sampled from the whole vocabulary."""
    group = make_group(3)
    first, second = (replace(r.completions[0], kept=of([frozenset({8}), frozenset({2, 5})])) for r in group.rollouts)
    told, free = Context(token_ids=(4,), role="tool"), replace(first, kept=None)
    context = Context(token_ids=group.prompt.token_ids, role="prompt", text=group.prompt.text)
    rollouts = (
        replace(group.rollouts[0], status="scored", branches=single_turn(group.prompt, first)),
        replace(group.rollouts[1], branches=(Trajectory(segments=(context, second, told, free)),)),
    )
    return replace(group, rollouts=rollouts)


def test_recorded_rollouts_and_their_metric(tmp_path):
    group = recorded_group()
    with closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, [group])
        writer.write(2, [make_group(3)])
    ((_, (actual,)), (_, (plain,))) = read_steps(tmp_path)
    kept = [[sets_of(c.kept) for c in rollout.completions] for rollout in actual.rollouts]
    assert kept == [[[{8}, {2, 5}]], [[{8}, {2, 5}], [ALL, ALL]]]
    assert actual.rollouts[0] == group.rollouts[0] and plain == make_group(3)
    assert group_metrics([group])["rollout/kept_entries/mean"] == 1.5
    assert "rollout/kept_entries/mean" not in group_metrics([make_group(3)])


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        (None, "no kept entries, which sampling.top_p, top_k or min_p need"),
        (of([frozenset({8})]), "kept entries of 1 tokens in a vocabulary of 200, expected 2 and 200"),
        (of([frozenset({8}), frozenset({3, 5})]), r"sampled token 2 at position 1 .* its kept entries \(2\)"),
        (of([ALL - {8}, frozenset({2})]), r"sampled token 8 at position 0 .* its kept entries \(199\)"),
    ],
)
def test_a_record_that_does_not_fit_names_the_sequence(kept, problem):
    group, model = make_group(3), replace(tiny_qwen3().model, vocab_size=VOCAB)
    completion = replace(group.rollouts[0].completions[0], kept=kept)
    wrong = replace(group, rollouts=(replace(group.rollouts[0], branches=single_turn(group.prompt, completion)),))
    truncated = replace(SamplingConfig(), top_k=5)
    with pytest.raises(KeptEntriesError, match=f"rollout chain_sum/3#0 .*{problem}"):
        require_kept([wrong], truncated, model)
    require_kept([group], SamplingConfig(), model)
    require_kept([recorded_group()], SamplingConfig(), model)
