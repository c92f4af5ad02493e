"""The loss of dpo against the formula of TRL's documentation, over any split into microbatches."""

import math

import pytest
import torch

from megatron_fp8rl.algo.losses import dpo
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.data.packing import SequenceTooLongError, divide, pack
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.types import LossInputs, Sample, Segment

LENGTHS = ((3, 5), (1, 2), (6, 4), (2, 2), (4, 1))  # tokens of the answers of each pair


def samples() -> list[Sample]:
    made = []
    for index, lengths in enumerate(LENGTHS):
        for side, length in zip(("chosen", "rejected"), lengths, strict=True):
            prompt, answer = (TokenArray.from_ids(list(range(1, 1 + n))) for n in (2 + index, length))
            segments = (Segment(prompt), Segment(answer, is_trained=True))
            made.append(Sample(name=f"{index}/{side}", environment="e", segments=segments))
    return made


def logprobs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(policy, reference) of each sample's answer, float64."""
    generator = torch.Generator().manual_seed(0)
    return {
        s.name: tuple(-torch.rand(2, s.num_loss_tokens, generator=generator, dtype=torch.float64)) for s in samples()
    }


def losses(max_tokens: int, **options: float) -> tuple[float, dict[str, float], torch.Tensor]:
    """(loss, metrics, gradient with respect to the policy's log-probability of the first chosen token)."""
    values, total, metrics = logprobs(), 0.0, {}
    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (batch,) = pack(samples(), data_size=1, data_rank=0, alignment=4, max_tokens=max_tokens, together=2)
    for mb in batch.microbatches:
        assert [name.partition("/")[2] for name in mb.names] == ["chosen", "rejected"] * (len(mb.names) // 2)
        trainer_T, ref_T = (torch.full(mb.tokens_T.shape, torch.nan, dtype=torch.float64) for _ in range(2))
        for index, name in enumerate(mb.names):
            mask_T = mb.loss_mask_T & (mb.sequence_ids_T == index)
            trainer_T[mask_T], ref_T[mask_T] = values[name]
        if "0/chosen" in mb.names:
            trainer_T = trainer_T + leaf * (mb.sequence_ids_T == mb.names.index("0/chosen"))
        mb = type(mb)(**{f: getattr(mb, f) for f in mb.__slots__ if f != "ref_logprobs_T"}, ref_logprobs_T=ref_T)
        inputs = LossInputs(
            mb=mb,
            batch=batch,
            trainer_logprobs_T=trainer_T,
            entropy_T=torch.zeros_like(ref_T),
            cfg=AlgoConfig(),
            max_completion_tokens=8,
        )
        loss, part = dpo(inputs, **options)
        total = total + loss
        for key, value in part.items():
            metrics[key] = metrics.get(key, 0.0) + value.item() / batch.num_loss_tokens
    total.backward()
    return total.item(), metrics, leaf.grad


@pytest.mark.parametrize("max_tokens", [24, 96])
def test_the_loss_is_that_of_trl(max_tokens):
    beta, smoothing, values = 0.3, 0.1, logprobs()
    total, metrics, gradient = losses(max_tokens, beta=beta, label_smoothing=smoothing)
    rewards = [
        [beta * float((values[f"{i}/{side}"][0] - values[f"{i}/{side}"][1]).sum()) for side in ("chosen", "rejected")]
        for i in range(len(LENGTHS))
    ]
    margins = [chosen - rejected for chosen, rejected in rewards]

    def logsigmoid(x: float) -> float:
        return -math.log1p(math.exp(-x))

    expected = sum(-logsigmoid(m) * (1 - smoothing) - logsigmoid(-m) * smoothing for m in margins) / len(margins)
    assert total == pytest.approx(expected, rel=1e-12)
    assert metrics["loss/reward_margin/mean"] == pytest.approx(sum(margins) / len(margins), rel=1e-5)
    assert metrics["loss/reward_accuracy/mean"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert metrics["loss/reward_chosen/mean"] == pytest.approx(sum(r[0] for r in rewards) / len(rewards), rel=1e-5)
    sigmoid = 1 / (1 + math.exp(-margins[0]))
    slope = beta * ((1 - smoothing) * (sigmoid - 1) + smoothing * sigmoid) / len(margins)
    assert gradient.item() == pytest.approx(slope * LENGTHS[0][0], rel=1e-12)


def test_pairs_stay_together_on_every_rank_and_must_fit():
    shares = divide(samples(), data_size=2, max_tokens=24, alignment=4, together=2)
    assert sum(share.num_sequences for (share,) in shares[:1]) == 2 * len(LENGTHS)
    for (share,) in shares:
        for microbatch in share.microbatches:
            names = [sample.name for sample in microbatch]
            assert names[1::2] == [name.replace("chosen", "rejected") for name in names[::2]]
    with pytest.raises(SequenceTooLongError, match=r"sample 2/chosen and the next 1 have 18 tokens"):
        divide(samples(), data_size=1, max_tokens=12, alignment=1, together=2)
