"""Top-k, top-p and min-p on a GPU: the engine's sampler and the trainer give a token the same log-probability.

The engine's patches run on vLLM's own sampler of the V2 runner, which has one kernel for fewer than 8 requests and one
for more. Sets of the former are compared with transformers' in float64, log-probabilities with torch's.
"""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_fp8rl import upstream
from tests.tolerances import LOGPROBS_FLOAT32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(not upstream.applies("report_kept_entries"), reason="refused with this version of vLLM"),
]
HIDDEN, ROWS, VOCAB = 256, 152_064, 151_936
CASES = [
    dict(top_p=0.9),
    dict(top_k=20),
    dict(min_p=0.05),
    dict(top_k=200, top_p=0.8),
    dict(top_k=50, top_p=0.95, min_p=0.1, temperature=0.7),
    dict(top_p=0.999, temperature=1.5),
    dict(),
]


@pytest.fixture
def engine(monkeypatch):
    """vLLM's modules with the patches of an exact engine that truncates, until the test ends."""
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample import logprob, sampler, states

    from megatron_fp8rl.rollout.vllm_plugin import patches, patches_kept, vllm_imports

    for owner, name in (
        (Sampler, "sample"),
        (Sampler, "forward"),
        (LogprobsProcessor, "_update_sample_logprobs"),
        (sampler, "compute_topk_scores"),
        (sampler.Sampler, "apply_sampling_params"),
        (states, "apply_temperature"),
        (logprob, "compute_token_logprobs"),
        (vllm_imports.batch_invariant(), "log_softmax"),
    ):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    # The number of accepted drafts, which needs the state of whole requests.
    monkeypatch.setattr(sampler, "get_num_sampled_and_rejected", lambda *args: (None, None))
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")  # log-probabilities of kept entries exclude it anyway
    patches_kept.report_kept_entries()
    patches.make_logprobs_order_independent()
    return sampler.Sampler


def sampled(sampler_class, logits, case):
    """(tokens int64 [n], log-probabilities float32 [n], kept entries) of a step in which each row is a request."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.states import RequestState

    from tests.unit.rollout.test_kept_patches import collected

    num, device = len(logits), logits.device
    requests = RequestState(num, 64, 64, 0, VOCAB, device)
    sampler = sampler_class(num, VOCAB, device, requests, logprobs_mode="processed_logprobs")
    for row in range(num):
        sampler.add_request(row, 1, SamplingParams(seed=row, logprobs=0, **case))
    sampler.apply_staged_writes()
    rows = torch.arange(num, dtype=torch.int32, device=device)
    batch = SimpleNamespace(
        expanded_idx_mapping=rows,
        idx_mapping_np=np.arange(num, dtype=np.int32),
        idx_mapping=rows,
        cu_num_logits_np=np.arange(num + 1, dtype=np.int32),
        cu_num_logits=torch.arange(num + 1, dtype=torch.int32, device=device),
        expanded_local_pos=torch.zeros_like(rows),
        positions=rows.long(),
        input_ids=torch.zeros_like(rows),
        logits_indices=rows.long(),
        seq_lens=rows + 1,
        num_reqs=num,
    )
    output = sampler(logits.clone(), batch)
    tensors = output.logprobs_tensors.to_cpu_nonblocking()
    torch.cuda.synchronize()
    lists = tensors.tolists()
    tokens = torch.from_numpy(lists.logprob_token_ids[:, 0]).long()
    assert torch.equal(tokens, output.sampled_token_ids[:, 0].cpu())
    return tokens.to(device), *collected(lists.slice_request(row, 1) for row in range(num))


def sets_of(kept):
    """bool [n, VOCAB]."""
    sets = np.ones((len(kept), VOCAB), bool)
    for row, part in zip(sets, kept.split([1] * len(kept))):
        if len(part.words) == kept.width:
            row[:] = np.unpackbits(part.words.view(np.uint8), bitorder="little")[:VOCAB]
        elif len(part.words):
            row[:] = np.isin(np.arange(VOCAB), part.words)
    return torch.from_numpy(sets).cuda()


@pytest.mark.parametrize("num", [5, 40])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_engine_and_trainer_agree_bit_for_bit(case, num, engine):
    from megatron_fp8rl.trainer.logprobs import HeadShard, token_logprobs
    from tests.unit.rollout.test_kept_patches import warped

    generator = torch.Generator("cuda").manual_seed(num)
    scales = torch.linspace(0.02, 0.4, num, device="cuda")[:, None]  # from nearly uniform to nearly certain
    hidden = (scales * torch.randn(num, HIDDEN, device="cuda", generator=generator)).bfloat16().requires_grad_()
    weight = torch.randn(ROWS, HIDDEN, device="cuda", generator=generator).bfloat16().requires_grad_()
    logits = hidden.detach() @ weight.detach()[:VOCAB].t()
    tokens, engines, kept = sampled(engine, logits, case)
    temperature = case.get("temperature", 1.0)
    shard = HeadShard.of(num_rows=ROWS, vocab_size=VOCAB, temperature=temperature, chunk_tokens=num, group=None)
    trainers, entropy = token_logprobs(hidden, weight, tokens, shard, kept)
    assert trainers.tolist() == engines.tolist()

    sets, z = sets_of(kept), logits.double().requires_grad_()
    if num < 8:  # The other kernel searches for the least likely entry in at most 18 steps.
        # The entries: those of transformers, except entries as likely as the least likely one, and rounded sums.
        expected = warped(z.detach(), **case)
        wanted, p = expected.isfinite(), (z.detach() / temperature).softmax(-1)
        lowest = [z.detach().masked_fill(~some, torch.inf).amin(-1, keepdim=True) for some in (sets, wanted)]
        assert (lowest[0] >= z.detach().masked_fill(sets, -torch.inf).amax(-1, keepdim=True)).all()
        is_edge = (z == lowest[0]) | (z == lowest[1])
        assert (p * ((sets != wanted) & ~is_edge)).sum(-1).max() < 1e-4
    assert sets.gather(1, tokens[:, None]).all() and (kept.counts() == sets.sum(-1).cpu().numpy()).all()

    log_p = torch.log_softmax((z / temperature).masked_fill(~sets, -torch.inf), dim=-1)
    at_token = log_p.gather(1, tokens[:, None])[:, 0]
    disorder = -(log_p.exp() * log_p.masked_fill(~sets, 0.0)).sum(-1)
    torch.testing.assert_close(trainers.detach().double(), at_token.detach(), **LOGPROBS_FLOAT32)
    torch.testing.assert_close(entropy.detach().double(), disorder.detach(), **LOGPROBS_FLOAT32)
    on = torch.randn(2, num, device="cuda", generator=generator)
    ((trainers * on[0]).sum() + (entropy * on[1]).sum()).backward()
    ((at_token * on[0]).sum() + (disorder * on[1]).sum()).backward()
    on_hidden = z.grad @ weight.detach()[:VOCAB].double()
    on_weight = z.grad.t() @ hidden.detach().double()
    for actual, right in ((hidden.grad, on_hidden), (weight.grad[:VOCAB], on_weight)):
        assert (actual.double() - right).norm() < 2**-7 * right.norm()
