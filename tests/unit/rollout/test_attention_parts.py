"""How a batch of an engine is divided for attention over an FP8 cache."""

import pytest
import torch

pytest.importorskip("vllm")
CPU = torch.device("cpu")


def test_sequences_that_decode_are_one_part_and_prompts_follow_in_parts_of_a_bounded_copy(monkeypatch):
    from megatron_fp8rl.rollout.vllm_plugin import patches_attention

    monkeypatch.setattr(patches_attention, "_COPIED_TOKENS", 100)
    counts, lengths = [1, 4, 0, 1, 7, 2, 90, 3], [9, 40, 0, 5, 30, 60, 300, 20]
    parts = patches_attention.parts_of(counts, lengths, CPU)
    # The copies of a part are as long as the longest: 2 x 40 tokens, and 300 are more than fit, alone.
    assert [part.rows.tolist() for part in parts] == [[0, 3], [1, 4], [5], [6], [7]]
    assert [part.tokens.tolist() for part in parts[:3]] == [[0, 5], [1, 2, 3, 4, *range(6, 13)], [13, 14]]
    assert [part.starts.tolist() for part in parts[:3]] == [[0, 1, 2], [0, 4, 11], [0, 2]]
    assert [(part.max_query, part.max_length) for part in parts] == [(1, 9), (7, 40), (2, 60), (90, 300), (3, 20)]
    assert all(
        part.rows.dtype == part.tokens.dtype == torch.int64 and part.starts.dtype == torch.int32 for part in parts
    )


def test_a_batch_may_have_no_prompt_and_no_sequence_that_decodes():
    from megatron_fp8rl.rollout.vllm_plugin.patches_attention import parts_of

    assert [part.max_query for part in parts_of([1, 1], [3, 4], CPU)] == [1]
    assert [part.rows.tolist() for part in parts_of([5, 6], [5, 6], CPU)] == [[0, 1]]
    assert parts_of([0, 0], [0, 0], CPU) == []
