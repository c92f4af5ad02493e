"""What vLLM's sampler keeps, as the engine reports it: the entries of transformers' warpers, for every token exact."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_fp8rl import upstream
from megatron_fp8rl.trainer.logprobs import HeadShard, token_logprobs

pytestmark = pytest.mark.skipif(
    not upstream.applies("report_kept_entries", "BufferingScheduler"), reason="refused with this version of vLLM"
)
NUM, VOCAB = 24, 300  # 10 words: up to 9 ids, or a mask
CASES = [
    dict(top_p=0.9),
    dict(top_k=3),
    dict(min_p=0.05),
    dict(top_k=40, top_p=0.8),
    dict(top_k=7, top_p=0.95, min_p=0.1, temperature=0.7),
    dict(top_p=0.999, temperature=1.5),
    dict(top_p=1e-6),
    dict(),
]


@pytest.fixture
def reporting(monkeypatch):
    """vLLM's classes with our patches, until the test ends."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.sample.sampler import Sampler

    from megatron_fp8rl.rollout.vllm_plugin.cpu import cpu_attention
    from megatron_fp8rl.rollout.vllm_plugin.patches_kept import report_kept_entries

    for owner, names in (
        (CPUAttentionBackendImpl, ("forward", "do_kv_cache_update")),
        (TopKTopPSampler, ("forward_cpu",)),
        (Sampler, ("sample", "forward", "compute_logprobs")),
        (LogprobsProcessor, ("_update_sample_logprobs",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, owner.__dict__[name])
    cpu_attention.register()
    report_kept_entries()


def logits_of() -> torch.Tensor:
    """BF16 numbers, with ties; rows from nearly uniform to nearly certain."""
    drawn = torch.randn(NUM, VOCAB, generator=torch.Generator().manual_seed(0))
    return (drawn * torch.linspace(0.1, 6, NUM)[:, None]).bfloat16().float()


def sampled(logits: torch.Tensor, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0):
    """vLLM's lists of a step, in which each row is the logits of a request."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=NUM))
    by_min_p = MinPLogitsProcessor(config, torch.device("cpu"), False)
    params = SamplingParams(min_p=min_p)
    added = [(row, params, [], []) for row in range(NUM)]
    by_min_p.update_state(BatchUpdate(batch_size=NUM, removed=[], added=added, moved=[]))
    nothing = torch.empty(0)
    metadata = SamplingMetadata(
        temperature=torch.full((NUM,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=torch.full((NUM,), top_p) if top_p < 1 else None,
        top_k=torch.full((NUM,), top_k) if top_k else None,
        generators={row: torch.Generator().manual_seed(row) for row in range(NUM)},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=nothing,
        presence_penalties=nothing,
        repetition_penalties=nothing,
        output_token_ids=[[] for _ in range(NUM)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([by_min_p]),
    )
    output = Sampler("processed_logprobs")(logits.clone(), metadata)
    return output.logprobs_tensors.to_cpu_nonblocking().tolists()


def warped(logits: torch.Tensor, *, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> torch.Tensor:
    """Logits as transformers warps them, in vLLM's order; -inf for entries that it drops."""
    import transformers as hf

    warpers = [hf.TemperatureLogitsWarper(temperature)]
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits


def collected(messages):
    """(log-probabilities, kept entries) that the server collects from the messages of a request."""
    from vllm.logprobs import FlatLogprobs
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from megatron_fp8rl.rollout.vllm_plugin.patches_kept import kept_entries_of

    logprobs = FlatLogprobs()
    processor = LogprobsProcessor(None, logprobs, None, 0.0, 0, None)
    for lists in messages:
        processor._update_sample_logprobs(lists)
    return np.float32(logprobs.logprobs), kept_entries_of(logprobs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_entries_are_those_of_transformers_and_the_trainer_agrees_bit_for_bit(case, reporting):
    logits = logits_of()
    step = sampled(logits, **case)
    tokens = torch.from_numpy(step.logprob_token_ids[:, 0]).long()
    logprobs, kept = collected(step.slice_request(row, 1) for row in range(NUM))
    expected = warped(logits, **case)
    sets = torch.from_numpy(np.stack([kept.contain(np.full(NUM, token)) for token in range(VOCAB)], axis=1))
    assert torch.equal(sets, expected.isfinite()) and kept.contain(tokens.numpy()).all()
    assert (kept.counts() == expected.isfinite().sum(-1).numpy()).all()
    reference = torch.log_softmax(expected.double(), -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(torch.from_numpy(logprobs).double(), reference, rtol=2e-6, atol=1e-6)
    shard = HeadShard.of(
        num_rows=VOCAB, vocab_size=VOCAB, temperature=case.get("temperature", 1.0), chunk_tokens=7, group=None
    )
    trainer, _ = token_logprobs(logits, torch.eye(VOCAB), tokens, shard, kept)
    assert trainer.tolist() == logprobs.tolist()


def test_a_buffer_of_tokens_keeps_each_tokens_entries(reporting):
    """Steps whose tokens have few words and many, in one message."""
    from vllm.v1.engine import EngineCoreOutput

    from megatron_fp8rl.rollout.vllm_plugin.patches_scheduler import TokenBuffer

    steps = [sampled(logits_of(), **case) for case in (CASES[1], CASES[5], CASES[7])]
    rows = [step.slice_request(5, 1) for step in steps]
    tokens = [int(row.logprob_token_ids[0, 0]) for row in rows]
    buffer = TokenBuffer(None, tokens, frozenset(), 9, True)
    for row in rows:
        buffer.logprobs += row.logprobs[:, 0].tolist()
        buffer.ranks += row.sampled_token_ranks.tolist()
        buffer.ids.append(row.logprob_token_ids)
    message = buffer.into(EngineCoreOutput("name", [])).new_logprobs
    assert message.logprob_token_ids[:, 0].tolist() == tokens and not buffer.ids
    (logprobs, kept), (expected, separate) = collected([message]), collected(rows)
    assert logprobs.tolist() == expected.tolist() and kept == separate and len(kept) == 3
    assert kept.lengths[0] == 3 and kept.lengths[1] == 10 and kept.lengths[2] == 0


def test_the_sampler_of_gpu_engines_reports_from_its_processed_logits():
    """``with_kept`` on what the V2 runner passes: int64 ids, and logits that are -inf where they were dropped."""
    from vllm.v1.outputs import LogprobsTensors

    from megatron_fp8rl.rollout.vllm_plugin.patches_kept import with_kept

    processed = torch.full((2, 70), -torch.inf)
    processed[0, [3, 69]], processed[1] = 1.5, torch.arange(70)
    tensors = LogprobsTensors(torch.tensor([[69], [0]]), torch.zeros(2, 1), torch.ones(2))
    lists = with_kept(tensors, processed).tolists()
    assert lists.logprob_token_ids.tolist() == [[69, 70, 2, 3, 69], [0, 70, 0, 0, 0]]
