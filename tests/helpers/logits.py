"""Logits of models by transformers and by the trainer, for the same packed ragged sequences."""

import torch

from megatron_fp8rl.config import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig

LENGTHS = ((11, 30, 7, 1), (5, 16))  # of the sequences of two microbatches
ALIGNMENT = 8  # every sequence is padded to a multiple, as the widest layout here needs


def sequences(model: ModelConfig) -> list[list[torch.Tensor]]:
    """Random tokens of every microbatch."""
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(0, model.vocab_size, (n,), generator=generator) for n in lengths] for lengths in LENGTHS]


def reference_logits(model: ModelConfig, folder: str) -> list[list[torch.Tensor]]:
    """Save random weights as a Hugging Face checkpoint; transformers' logits of each sequence alone."""
    import transformers

    from megatron_fp8rl.names import registry

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**registry.to_hf_config(model))
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Norm weights away from 1 and logits of unit size, so that no mistake can hide.
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.1)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)  # about as far apart as the scores that it is added to
        reference.save_pretrained(folder)
        return [[reference(tokens[None]).logits[0] for tokens in pack] for pack in sequences(model)]


def _pack(sequences: list[torch.Tensor]):
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = [-(-s.numel() // ALIGNMENT) * ALIGNMENT for s in sequences]
    tokens = torch.cat([torch.nn.functional.pad(s, (0, n - s.numel())) for s, n in zip(sequences, padded)])
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(padded),
        max_seqlen_kv=max(padded),
    )
    return tokens, packed


def _local_positions(packed, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Packed positions of a context-parallel rank: chunks r and 2 * cp - 1 - r of each sequence."""
    parts = []
    for start, end in zip(packed.cu_seqlens_q, packed.cu_seqlens_q[1:]):
        chunks = torch.arange(int(start), int(end)).chunk(2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else chunks
    return torch.cat(parts)


def float32_run(model: ModelConfig, layout: dict, trainer: str = "bf16") -> RunConfig:
    """A run of float32 parameters; with a recipe as ``trainer``, products have FP8 operands."""
    return RunConfig(
        name="logits",
        model=model,
        parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(trainer=trainer, rollout="bf16", params="fp32"),
    )


def trainer_logits(
    model: ModelConfig, layout: dict, folder: str, parallel=None, trainer: str = "bf16"
) -> list[torch.Tensor] | None:
    """Packed logits [T, vocab] of each microbatch, on ranks of the last stage; load_hf and the schedules included."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_fp8rl.trainer.model.build import build_chunks, load_hf
    from megatron_fp8rl.trainer.parallel import Parallel

    cfg = float32_run(model, layout, trainer)
    parallel = parallel or Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    load_hf(chunks, folder, cfg.model, parallel)
    packs = [_pack(pack) for pack in sequences(model)]

    def step(iterator, chunk):
        tokens, packed = next(iterator)
        mine = _local_positions(packed, parallel.cp_size, parallel.cp_rank)
        out = chunk(tokens[mine][None], mine[None], None, packed_seq_params=packed)
        return out, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(logits)[0]

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(packs) for _ in chunks],
            model=chunks,
            num_microbatches=len(packs),
            seq_length=packs[0][0].numel(),
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not parallel.is_last_stage:
        return None
    whole = []
    for logits, (tokens, packed) in zip(outputs, packs):
        shards = [torch.empty_like(logits) for _ in range(parallel.cp_size)]
        dist.all_gather(shards, logits.contiguous(), group=parallel.cp_group)
        full = torch.empty(tokens.numel(), logits.shape[-1])
        for rank, shard in enumerate(shards):
            full[_local_positions(packed, parallel.cp_size, rank)] = shard
        whole.append(full[:, : model.vocab_size])
    return whole


def unpacked(packed: list[torch.Tensor], reference: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Packed logits cut into those of each sequence of ``reference``, without padding."""
    result = []
    for full, pack in zip(packed, reference, strict=True):
        starts = torch.tensor([0] + [-(-s.shape[0] // ALIGNMENT) * ALIGNMENT for s in pack]).cumsum(0)
        result.append([full[start : start + len(logits)] for start, logits in zip(starts, pack)])
    return result


def assert_logits_equal(trainer: list[torch.Tensor], reference: list[list[torch.Tensor]], **tolerance: float) -> None:
    """Compare packed logits with those of each sequence alone; padding is left out."""
    for ours, theirs in zip(unpacked(trainer, reference), reference, strict=True):
        for logits, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(logits, expected, **tolerance)
