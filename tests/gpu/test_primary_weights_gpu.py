"""FP8 primary weights on Transformer Engine's tensors, beside BF16 parameters, on a GPU; -s shows losses and memory."""

import gc
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, OptimConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.kernels.blockwise import quantize_weight_in_torch
from megatron_fp8rl.kernels.fp8_parameter import fp8_weight, is_fp8
from megatron_fp8rl.precision.hardware import installed_packages
from megatron_fp8rl.preflight import trainer_memory
from megatron_fp8rl.preflight.memory import GPUS
from tests.helpers.hopper import ON_HOPPER
from tests.helpers.models import latent, small_model
from tests.helpers.training import alone, continue_training, make_batch, make_loss, run_config
from tests.tolerances import FP8_FIRST_LOSS, FP8_LOSS_NOISE

pytestmark = [
    *ON_HOPPER,
    pytest.mark.skipif("transformer_engine" not in installed_packages(), reason="needs Transformer Engine"),
]

MOE = small_model((4, 256, 4, 2, 128, 62), experts=(4, 2, 128), max_position_embeddings=128, initializer_range=0.08)
DENSE = replace(MOE, family="qwen3", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0, ffn_hidden_size=512)
LATENT = latent(MOE)
OPTIM = OptimConfig(lr=3e-3, eps=1e-2)
MIB = 2**20


def _cfg(model: ModelConfig, params: str, *, scales: str = "pow2", edges: int = 1, **optim) -> RunConfig:
    precision = PrecisionConfig(
        trainer="blockwise",
        params=params,
        scales=scales,
        kernels={"linears": "te", "experts": "te"},
        bf16_last_layers=edges,
        exact=False,
    )
    return replace(run_config(model=model, optim=replace(OPTIM, **optim)), precision=precision)


def _policy(cfg: RunConfig, parallel):
    from megatron_fp8rl.trainer.policy import Policy

    return Policy.build(cfg, parallel)


def _logprobs(policy) -> torch.Tensor:
    batch = policy.with_old_logprobs(make_batch(policy.cfg, 0))
    return torch.cat([mb.old_logprobs_T.float().cpu() for mb in batch.microbatches])


def _require_bytes_of_masters(policy) -> None:
    scales, actual = policy.cfg.precision.scales, 0
    for name, parameter in policy.named_parameters():
        if not is_fp8(parameter):
            continue
        actual += 1
        master = parameter.main_param.view(parameter.shape).bfloat16()
        data, scale = quantize_weight_in_torch(master, scales)
        held = fp8_weight(parameter)
        if scales == "pow2":
            assert torch.equal(held.scale, scale), name
            assert torch.equal(held.data.view(torch.uint8), data.view(torch.uint8)), name
        else:  # quotients may differ in the last bit
            assert torch.allclose(held.scale, scale, rtol=3e-7, atol=0), name
            differing = (held.data.view(torch.uint8) != data.view(torch.uint8)).float().mean()
            assert differing < 0.01, name
        if parameter._columnwise_data is not None:
            assert torch.equal(parameter._columnwise_data, parameter._rowwise_data.t()), name
    assert actual


@pytest.mark.parametrize("scales", ["pow2", "fp32"])
@pytest.mark.parametrize("model", [DENSE, MOE, LATENT], ids=["dense", "moe", "latent"])
def test_bytes_are_the_quantized_masters_at_every_step(model, scales):
    cfg = _cfg(model, "fp8", scales=scales)
    with alone(cfg) as parallel:
        policy = _policy(cfg, parallel)
        _require_bytes_of_masters(policy)
        for _ in range(3):
            continue_training(policy, 1)
            _require_bytes_of_masters(policy)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_training_follows_bf16_parameters(model, overlap):
    cfg, actual = _cfg(model, "fp8", overlap_grad_reduce=overlap), {}
    with alone(cfg) as parallel:
        for params in ("fp8", "bf16"):
            policy = _policy(_cfg(model, params, overlap_grad_reduce=overlap), parallel)
            first = _logprobs(policy)
            metrics, _ = continue_training(policy, 20)
            actual[params] = first, [step["train/loss/mean"] for step in metrics]
    losses = [actual[params][1] for params in ("fp8", "bf16")]
    print(f"\nprimary weights {'moe' if model.is_moe else 'dense'} losses {losses[0][::5]} with BF16 {losses[1][::5]}")
    # The same bytes in the same products. Expert outputs are summed by atomic additions, in any order.
    if not model.is_moe:
        assert torch.equal(actual["fp8"][0], actual["bf16"][0])
    assert losses[0][0] == pytest.approx(losses[1][0], abs=FP8_FIRST_LOSS)
    assert losses[0][1:] == pytest.approx(losses[1][1:], abs=FP8_LOSS_NOISE)


def test_fp32_scales_train_alike():
    cfg, losses = _cfg(DENSE, "fp8", scales="fp32"), []
    with alone(cfg) as parallel:
        for params in ("fp8", "bf16"):
            metrics, _ = continue_training(_policy(_cfg(DENSE, params, scales="fp32"), parallel), 20)
            losses.append([step["train/loss/mean"] for step in metrics])
    assert losses[0] == pytest.approx(losses[1], abs=FP8_LOSS_NOISE)


@pytest.mark.parametrize("saved", ["fp8", "bf16"])
@pytest.mark.parametrize("loaded", ["fp8", "bf16"])
def test_checkpoints_go_both_ways(saved, loaded, tmp_path):
    from megatron_fp8rl.trainer import checkpoint

    with alone(_cfg(DENSE, saved)) as parallel:
        first = _policy(_cfg(DENSE, saved), parallel)
        continue_training(first, 2)
        path = checkpoint.save(str(tmp_path), 2, first, {})
        expected = _logprobs(first)
        second = _policy(replace(_cfg(DENSE, loaded), seed=7), parallel)
        continue_training(second, 1)  # so that there are columns of other weights
        checkpoint.restore(path, second)
        assert torch.equal(_logprobs(second), expected)
        if loaded == "fp8":
            _require_bytes_of_masters(second)
        steps = [continue_training(policy, 2)[0] for policy in (first, second)]
    for a, b in zip(*steps, strict=True):
        assert a["train/loss/mean"] == pytest.approx(b["train/loss/mean"], abs=1e-5)


def test_what_is_published_are_the_bytes():
    from megatron_fp8rl.names.layouts import TrainerLayout
    from megatron_fp8rl.weight_sync.pack import LocalShards, RoundPacker
    from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs

    cfg = _cfg(DENSE, "fp8")
    with alone(cfg) as parallel:
        policy = _policy(cfg, parallel)
        continue_training(policy, 2)
        parameters = dict(policy.named_tensors())
        shards = LocalShards(parameters, TrainerLayout(), cfg.model, 0)
        actual = {}
        for number in PlanInputs.of(cfg).slices().rounds:
            (message,) = number.messages
            slot = torch.zeros(message.num_bytes, dtype=torch.uint8, device=parallel.device)
            RoundPacker(number, slot, shards, rank=0, group=None)()
            for part in message.parts:
                data = (
                    slot[part.offset : part.offset + part.num_bytes].view(getattr(torch, part.dtype)).view(part.shape)
                )
                actual.setdefault(part.name, []).append(data)
        whole = {name: torch.cat(parts) for name, parts in actual.items()}
        sent = {name: (data, whole.get(f"{name}_scale_inv")) for name, data in whole.items()}
        for layer in range(cfg.model.num_layers - 1):
            ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
            attention_out = parameters[f"{ours}.self_attention.linear_proj.weight"]
            _require_same(attention_out, [sent[f"{theirs}.self_attn.o_proj.weight"]])
            _require_same(parameters[f"{ours}.mlp.linear_fc2.weight"], [sent[f"{theirs}.mlp.down_proj.weight"]])
            gate_up = [sent[f"{theirs}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            _require_same(parameters[f"{ours}.mlp.linear_fc1.weight"], gate_up)


def _require_same(parameter, pieces) -> None:
    held = fp8_weight(parameter)
    assert torch.equal(torch.cat([data.view(torch.uint8) for data, _ in pieces]), held.data.view(torch.uint8))
    assert torch.equal(torch.cat([scale for _, scale in pieces]), held.scale)


class _Memory:
    """Bytes of new tensors in GPU memory: at the end of a phase, and at its peak."""

    def __init__(self):
        gc.collect()
        torch.cuda.empty_cache()
        self._others = torch.cuda.memory_allocated()
        self.held, self.peak = {}, {}
        torch.cuda.reset_peak_memory_stats()

    def mark(self, phase: str) -> None:
        self.held[phase] = torch.cuda.memory_allocated() - self._others
        self.peak[phase] = torch.cuda.max_memory_allocated() - self._others
        torch.cuda.reset_peak_memory_stats()

    def __str__(self) -> str:
        return "  ".join(
            f"{phase} {held / MIB:.0f} (peak {self.peak[phase] / MIB:.0f})" for phase, held in self.held.items()
        )


def _phases_of_an_update(policy, memory: _Memory) -> None:
    """The second update of a policy: after log-probabilities, before the optimizer's step, and at the end."""
    batch = policy.with_old_logprobs(make_batch(policy.cfg, 0))
    memory.mark("log-probs")
    step = policy.optimizer.step

    def mark_and_step(lr: float) -> float:
        memory.mark("gradients")
        return step(lr)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy.optimizer, "step", mark_and_step)
        policy.update(batch, make_loss(policy.cfg))
    memory.mark("step")


def _expected_states(cfg) -> int:
    """Bytes by the doctor, without activations and temporaries."""
    expected = trainer_memory.estimate_stage(cfg, GPUS["h200"], GPUS["h200"].memory_bytes, 1.0, 0)
    return sum(expected.part(name).num_bytes for name in ("weights", "gradients", "optimizer states", "FP8 copies"))


def test_memory_is_lower_as_the_doctor_says():
    """An FP8 weight takes 2 bytes where a BF16 one and its FP8 copies take 4; the optimizer's step adds none."""
    model = replace(DENSE, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, num_key_value_heads=4)
    actual, expected, count = {}, {}, 0
    with alone(_cfg(model, "fp8")) as parallel:
        for params in ("fp8", "bf16"):
            continue_training(_policy(_cfg(DENSE, params), parallel), 1)  # for workspaces, which stay
            memory = actual[params] = _Memory()
            policy = _policy(_cfg(model, params, edges=0), parallel)
            memory.mark("build")
            continue_training(policy, 1)
            memory.mark("first update")
            _phases_of_an_update(policy, memory)
            count = count or sum(p.numel() for p in policy.models[0].parameters() if is_fp8(p))
            expected[params] = _expected_states(policy.cfg)
            print(f"\nprimary weights {params}, MiB: {memory}; doctor's gradients {expected[params] / MIB:.0f}")
            del policy
    assert count > 6e7
    saved = {phase: (held - actual["fp8"].held[phase]) / count for phase, held in actual["bf16"].held.items()}
    peaks = {params: max(memory.peak.values()) for params, memory in actual.items()}
    print(f"\nprimary weights save {saved} bytes of a weight, {(peaks['bf16'] - peaks['fp8']) / count:.2f} at the peak")
    for params, memory in actual.items():
        assert memory.held["gradients"] == pytest.approx(expected[params], rel=0.02), params
    assert saved["log-probs"] == pytest.approx(1, abs=0.1)  # 2 + 1 in rows, and 1 in rows + 1 in columns
    assert saved["gradients"] == pytest.approx(2, abs=0.1)
    assert (peaks["bf16"] - peaks["fp8"]) / count > 1.5


def test_memory_comes_and_goes():
    model = replace(DENSE, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8, num_key_value_heads=4)
    parts = ("params", "gradients", "optimizer")
    with alone(_cfg(model, "fp8")) as parallel:
        for params in ("fp8", "bf16"):
            continue_training(_policy(_cfg(DENSE, params), parallel), 1)
            memory = _Memory()
            policy = _policy(_cfg(model, params, edges=0, offload=parts), parallel)
            continue_training(policy, 1)
            memory.mark("here")
            expected = _logprobs(policy)
            policy.offload.release(*parts)
            memory.mark("away")
            print(f"\nprimary weights {params}, MiB: {memory}")
            assert memory.held["away"] < 0.2 * memory.held["here"]
            policy.offload.restore()
            assert torch.equal(_logprobs(policy), expected)
            continue_training(policy, 1)
            if params == "fp8":
                _require_bytes_of_masters(policy)
            del policy
