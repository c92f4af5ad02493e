"""Messages between random layouts: every byte that an engine keeps arrives once, and is that of the whole tensor."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_plan import DENSE, LAYOUTS, MOE, TIED, table

from megatron_fp8rl.names import registry
from megatron_fp8rl.weight_sync.digest import digest, headers_of, values_of_sums, widened
from megatron_fp8rl.weight_sync.partial import PartialSums
from megatron_fp8rl.weight_sync.plan import EngineLayout, PlanError, plan
from megatron_fp8rl.weight_sync.schedule import Exchange, Part, exchange

ENGINES = [EngineLayout(), EngineLayout(tensor=2), EngineLayout(tensor=2, expert=2), EngineLayout(tensor=4, expert=4)]


def every_case():
    for model in (DENSE, MOE, TIED):
        for layout in LAYOUTS:
            for engine in ENGINES:
                if model.is_moe or layout.expert == engine.expert == 1:
                    yield model, layout, engine


CASES = list(every_case())


def whole_tensors(exchanged: Exchange) -> dict[str, torch.Tensor]:
    """Random content for every wire tensor, in the dtype that travels."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for part in (part for r in exchanged.rounds for m in r.messages for part in m.parts):
        if part.name not in tensors:
            shape = [-(-n // 128) for n in part.transfer.shape] if part.is_scale else part.transfer.shape
            tensors[part.name] = torch.randn(shape, generator=generator).to(getattr(torch, part.dtype))
    return tensors


def part_of(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    return tensor.narrow(part.transfer.axis, part.start, part.stop - part.start).contiguous()


@pytest.mark.parametrize(("model", "layout", "engine"), CASES)
def test_every_kept_byte_arrives_once_and_the_sums_of_its_parts_are_its_digest(model, layout, engine):
    precision = "fp8" if engine.tensor < 4 else "bf16"
    made = plan(model, table(model, precision), layout, engine)
    exchanged = exchange(made, model, bucket_bytes=random.Random(str(layout)).choice((1 << 14, 1 << 17, 1 << 30)))
    tensors = whole_tensors(exchanged)
    held: dict[tuple[int, str], torch.Tensor] = {}
    counts: dict[tuple[int, str], torch.Tensor] = {}
    sums: dict[tuple[int, str], int] = {}
    for number in exchanged.rounds:
        for message in number.messages:
            end = 0
            for part in message.parts:
                assert part.offset >= end and part.offset % 64 == 0
                end = part.offset + part.num_bytes
                key = message.engine_rank, part.name
                sent = part_of(tensors[part.name], part)
                local = (part.transfer.axis, part.start - part.kept[0], part.stop - part.start)
                held.setdefault(key, torch.zeros(part.kept_shape, dtype=sent.dtype)).narrow(*local).copy_(sent)
                counts.setdefault(key, torch.zeros(part.kept_shape)).narrow(*local).add_(1)
                sums[key] = sums.get(key, 0) + PartialSums([(sent, part.words)])().item()
            assert message.num_bytes >= end
    assert all((count == 1).all() for count in counts.values())
    for transfer in made.transfers:
        for rank, kept in enumerate(transfer.slices):
            assert ((rank, transfer.name) in held) == (kept is not None and kept[0] < kept[1]), transfer.name
            if kept is None or kept[0] == kept[1]:
                continue
            expected = tensors[transfer.name].narrow(transfer.axis, kept[0], kept[1] - kept[0])
            assert torch.equal(held[rank, transfer.name].view(torch.uint8), expected.contiguous().view(torch.uint8))
    for key, tensor in held.items():
        wide = widened(tensor)
        found = np.array([sums[key] & (1 << 64) - 1], dtype=np.uint64)
        (value,) = values_of_sums(found, headers_of([(wide.dtype, tuple(wide.shape))]))
        assert f"{value:016x}" == digest(wide), key


@pytest.mark.parametrize(("model", "layout"), [(m, t) for m, t, e in CASES if e == ENGINES[1]])
def test_senders_hold_what_they_send_and_share_the_work(model, layout):
    made = plan(model, table(model, "fp8"), layout, EngineLayout(tensor=2))
    exchanged = exchange(made, model, bucket_bytes=1 << 16)
    weights = registry.weights(model)
    sent = dict.fromkeys(range(layout.world_size), 0)
    for message in (m for r in exchanged.rounds for m in r.messages):
        for part in message.parts:
            sent[message.sender] += part.num_bytes
            if part.transfer.quantize == "gathered":
                continue
            shards = layout.holders(weights[part.transfer.mcore_name], model)
            owners = {s.rank: (s.start, s.stop) for s in part.transfer.sources}
            (lowest,) = {ranks[0] for ranks in shards if message.sender in ranks}
            if not part.is_scale:
                assert owners[lowest][0] <= part.start and part.stop <= owners[lowest][1]
    gathered = any(t.quantize == "gathered" for t in made.transfers)
    if not gathered and layout.pipeline == 1:
        assert max(sent.values()) < 1.3 * min(sent.values())


def test_rounds_are_bounded_and_end_together():
    made = plan(MOE, table(MOE, "fp8"), LAYOUTS[-1], EngineLayout(tensor=2))
    exchanged = exchange(made, MOE, bucket_bytes=1 << 18)
    assert exchanged.senders == list(range(8)) and len(exchanged.rounds) > 3
    for sender in exchanged.senders:
        assert exchanged.out_bytes(sender) <= 1 << 17  # eight senders feed two ranks; the largest piece is smaller
    assert all(exchanged.in_bytes(rank) <= 8 << 17 for rank in range(2))
    assert exchanged == exchange(made, MOE, bucket_bytes=1 << 18)
    assert exchanged.num_bytes >= made.num_bytes  # what both ranks keep is sent to both


def test_whole_tensors_for_loaders():
    made = plan(MOE, table(MOE, "fp8"), LAYOUTS[9], EngineLayout(tensor=2, expert=2))
    exchanged = exchange(made, MOE, bucket_bytes=1 << 20, whole=True)
    assert exchanged.num_bytes == 2 * made.num_bytes


def test_experts_lie_as_the_engine_stacks_them():
    """Gate and up of one expert after another, then all down: few copies write them."""
    made = plan(MOE, table(MOE, "fp8"), LAYOUTS[0], EngineLayout())
    (number,) = exchange(made, MOE, bucket_bytes=1 << 30).rounds
    (message,) = number.messages
    order = [part.name for part in message.parts]
    prefix = "model.layers.1.mlp.experts"
    start = order.index(f"{prefix}.0.gate_proj.weight")
    assert order[start : start + 4] == [f"{prefix}.{e}.{kind}_proj.weight" for e in (0, 1) for kind in ("gate", "up")]
    assert order.index(f"{prefix}.1.down_proj.weight") == order.index(f"{prefix}.0.down_proj.weight") + 1


def test_parts_that_cut_words_are_refused():
    odd = replace(DENSE, hidden_size=130, num_attention_heads=2, num_key_value_heads=2, head_dim=1, vocab_size=6)
    made = plan(odd, table(odd, "bf16"), LAYOUTS[1], EngineLayout())
    with pytest.raises(PlanError, match="does not fill words of 8 bytes; choose rollout.transport shm"):
        for message in (m for r in exchange(made, odd, bucket_bytes=1 << 20).rounds for m in r.messages):
            for part in message.parts:
                assert len(part.words) == 3
