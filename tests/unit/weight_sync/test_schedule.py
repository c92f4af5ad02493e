"""Messages between random layouts: every byte that an engine keeps arrives once, and is that of the whole tensor."""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_fp8rl.config import EngineConfig, ParallelConfig, WeightSyncConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.names.layouts import EngineLayout
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.weight_sync.digest import digest, headers_of, terms_of_words, values_of_sums, widened
from megatron_fp8rl.weight_sync.part_sums import PartSums
from megatron_fp8rl.weight_sync.plan import Transfer, plan
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.schedule import Part, SendSchedule, plan_schedule
from tests.helpers.plans import DENSE, LAYOUTS, MOE, TABLES, TIED, table

ENGINES = [
    EngineLayout(),
    EngineLayout(tensor=2),
    EngineLayout(tensor=2, expert=2),
    EngineLayout(tensor=4, expert=4),
    EngineLayout(data=2, expert=2),
    EngineLayout(data=2, tensor=2, expert=4),
    EngineLayout(data=2),
]


def every_case():
    for model in (DENSE, MOE, TIED):
        for layout in LAYOUTS:
            for engine in ENGINES:
                if model.is_moe or layout.expert == engine.expert == engine.data == 1:
                    yield model, layout, engine


CASES = list(every_case())


def whole_tensors(planned: SendSchedule) -> dict[str, torch.Tensor]:
    """Random content for every wire tensor, in the dtype that travels."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for part in (part for r in planned.rounds for m in r.messages for part in m.parts):
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
    planned = plan_schedule(made, model, bucket_bytes=random.Random(str(layout)).choice((1 << 14, 1 << 17, 1 << 30)))
    tensors = whole_tensors(planned)
    held: dict[tuple[int, str], torch.Tensor] = {}
    counts: dict[tuple[int, str], torch.Tensor] = {}
    sums: dict[tuple[int, str], list[tuple[Part, torch.Tensor]]] = {}
    for number in planned.rounds:
        for message in number.messages:
            end = 0
            for part in message.parts:
                assert part.offset >= end and part.offset % 64 == 0
                end = part.offset + part.num_bytes
                sent = part_of(tensors[part.name], part)
                local = (part.transfer.axis, part.start - part.kept[0], part.stop - part.start)
                for key in ((rank, part.name) for rank in message.engine_ranks):
                    held.setdefault(key, torch.zeros(part.kept_shape, dtype=sent.dtype)).narrow(*local).copy_(sent)
                    counts.setdefault(key, torch.zeros(part.kept_shape)).narrow(*local).add_(1)
                    sums.setdefault(key, []).append((part, PartSums([(sent, part.extent)])()))
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
        assert digest_of(sums[key], tensor) == digest(widened(tensor)), key


def digest_of(actual: list[tuple[Part, torch.Tensor]], whole: torch.Tensor) -> str:
    """From what senders take of their parts, as trainer rank 0 puts it together."""
    total, words = 0, {}
    for part, numbers in actual:
        first, *cut = numbers.tolist()
        total += first
        for word, value in zip(part.cut_words, cut, strict=True):
            words[word] = words.get(word, 0) + value
    places, values = (np.array(list(column), dtype=np.int64) for column in (words, words.values()))
    total += sum(terms_of_words(values, places).tolist())
    wide = widened(whole)
    sums = np.array([total & (1 << 64) - 1], dtype=np.uint64)
    (value,) = values_of_sums(sums, headers_of([(wide.dtype, tuple(wide.shape))]))
    return f"{value:016x}"


@pytest.mark.parametrize(("model", "layout"), [(m, t) for m, t, e in CASES if e == ENGINES[1]])
def test_senders_hold_what_they_send_and_share_the_work(model, layout):
    made = plan(model, table(model, "fp8"), layout, EngineLayout(tensor=2))
    planned = plan_schedule(made, model, bucket_bytes=1 << 16)
    weights = registry.weights(model)
    sent = dict.fromkeys(range(layout.world_size), 0)
    for message in (m for r in planned.rounds for m in r.messages):
        for part in message.parts:
            sent[message.sender] += part.num_bytes * len(message.engine_ranks)
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
    planned = plan_schedule(made, MOE, bucket_bytes=1 << 18)
    senders = sorted({message.sender for number in planned.rounds for message in number.messages})
    assert senders == list(range(8)) and len(planned.rounds) > 3
    for sender in senders:
        assert planned.out_bytes(sender) <= 1 << 17  # eight senders feed two ranks; the largest piece is smaller
    assert all(planned.in_bytes(rank) <= 8 << 17 for rank in range(2))
    ends = {sender: max(i for i, r in enumerate(planned.rounds) if r.sent_by(sender)) for sender in senders}
    assert min(ends.values()) >= len(planned.rounds) - 2
    assert planned == plan_schedule(made, MOE, bucket_bytes=1 << 18)
    assert planned.num_bytes >= made.num_bytes  # what both ranks keep is sent to both


def test_whole_tensors_for_loaders():
    inputs = PlanInputs(
        model=MOE,
        precision=TABLES["fp8"],
        parallel=ParallelConfig(world_size=4, tensor=2, expert=2, expert_tensor=2),
        engine=EngineConfig(tensor=2, expert=2),
        weight_sync=WeightSyncConfig(bucket_bytes=1 << 20),
    )
    made, planned = inputs.plan, inputs.whole(range(MOE.num_layers))
    experts = {t.name: t for t in made.transfers if ".experts." in t.name}
    bytes_of_experts = sum(tensor.num_bytes for t in experts.values() for tensor in t.wire_tensors())
    # Both ranks receive the whole of all other tensors, and of the experts those that they keep.
    assert planned.num_bytes == 2 * made.num_bytes - bytes_of_experts
    for message in (m for r in planned.rounds for m in r.messages):
        for part in message.parts:
            assert part.transfer.name not in experts or len(message.engine_ranks) == 1
    # Of a part of the layers, what is in them or in none.
    sent = {part.name for r in planned.rounds for m in r.messages for part in m.parts}
    of_two = {part.name for r in inputs.whole([1, 3]).rounds for m in r.messages for part in m.parts}
    assert of_two == {name for name in sent if not name.startswith(("model.layers.0.", "model.layers.2."))} < sent


@pytest.mark.parametrize("engine", ENGINES)
def test_what_several_engine_ranks_keep_is_packed_once(engine):
    made = plan(MOE, table(MOE, "bf16"), LAYOUTS[-1], engine)
    planned = plan_schedule(made, MOE, bucket_bytes=1 << 17)
    packed, distinct = {}, {}
    for message in (m for r in planned.rounds for m in r.messages):
        for part in message.parts:
            packed[part.name] = packed.get(part.name, 0) + part.num_bytes
    for transfer in made.transfers:
        item = math.prod(transfer.shape) // transfer.shape[transfer.axis] * (4 if transfer.dtype == "float32" else 2)
        kept = {span for span in transfer.slices if span is not None}
        distinct[transfer.name] = sum(item * (stop - start) for start, stop in kept)
    assert packed == {name: size for name, size in distinct.items() if size}


def test_experts_lie_as_the_engine_stacks_them():
    """Gate and up of one expert after another, then all down: few copies write them."""
    made = plan(MOE, table(MOE, "fp8"), LAYOUTS[0], EngineLayout())
    (number,) = plan_schedule(made, MOE, bucket_bytes=1 << 30).rounds
    (message,) = number.messages
    order = [part.name for part in message.parts]
    prefix = "model.layers.1.mlp.experts"
    start = order.index(f"{prefix}.0.gate_proj.weight")
    assert order[start : start + 4] == [f"{prefix}.{e}.{kind}_proj.weight" for e in (0, 1) for kind in ("gate", "up")]
    assert order.index(f"{prefix}.1.down_proj.weight") == order.index(f"{prefix}.0.down_proj.weight") + 1


@pytest.mark.parametrize("seed", range(40))
def test_any_parts_of_a_tensor_have_its_digest(seed):
    """Odd sizes and edges, rows and columns, every type that travels."""
    draw = random.Random(seed)
    dtype = draw.choice(("bfloat16", "float8_e4m3fn", "float32"))
    axis = draw.randrange(2)
    shape = (draw.randint(1, 40),) if draw.random() < 0.3 and axis == 0 else (draw.randint(1, 40), draw.randint(1, 40))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
    length = shape[axis]
    edges = sorted({0, length, *(draw.randint(0, length) for _ in range(draw.randint(0, 6)))})
    transfer = Transfer(
        name="w",
        mcore_name="w",
        shape=shape,
        axis=axis,
        sources=(),
        quantize="never",
        dtype="bfloat16",
        format=QuantFormat(name="w", element=dtype),
        slices=(),
    )
    actual = []
    for start, stop in itertools.pairwise(edges):
        part_shape = list(shape)
        part_shape[axis] = stop - start
        part = Part(transfer, False, start, stop, (0, length), tuple(part_shape), 0)
        actual.append((part, PartSums([(part_of(tensor, part), part.extent)])()))
    assert digest_of(actual, tensor) == digest(widened(tensor))


def test_words_that_parts_cut_are_few_and_known_to_both_ends():
    odd = replace(DENSE, hidden_size=130, num_attention_heads=2, num_key_value_heads=2, head_dim=1, vocab_size=6)
    made = plan(odd, table(odd, "bf16"), LAYOUTS[1], EngineLayout())
    parts = [
        part for r in plan_schedule(made, odd, bucket_bytes=1 << 20).rounds for m in r.messages for part in m.parts
    ]
    cut = [part for part in parts if part.words is None]
    assert cut and all(part.cut_words for part in cut)
    for part in parts:
        content = torch.zeros(part.shape, dtype=getattr(torch, part.dtype))
        assert len(PartSums([(content, part.extent)])()) == 1 + len(part.cut_words)
