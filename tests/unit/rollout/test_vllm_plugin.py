"""Parts of the vLLM plug-in: copies between fixed places, kinds of layers, changes to kernels of vLLM."""

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_fp8rl.rollout.vllm_plugin import patches
from megatron_fp8rl.rollout.vllm_plugin.kernel_weights import engine_module_of, first_layers_by_kind
from megatron_fp8rl.weight_sync.copies import Copies


def test_stacked_experts_are_one_copy():
    """Gate and up of four experts lie in the message as the kernel stacks them; a gap in the message ends a run."""
    stacked = torch.zeros(4, 256, 128).to(torch.float8_e4m3fn)
    message = torch.randint(0, 120, (4 * 256 * 128 + 64,), dtype=torch.uint8)
    pairs, size = [], 128 * 128
    for index in range(8):
        start = index * size + (64 if index >= 6 else 0)
        source = message[start : start + size].view(torch.float8_e4m3fn).view(128, 128)
        pairs.append((stacked[index // 2].split(128)[index % 2], source))
    copies = Copies(pairs[::-1])
    assert len(copies) == 2
    copies()
    expected = torch.cat([message[: 6 * size], message[6 * size + 64 :]])
    assert torch.equal(stacked.view(torch.uint8).reshape(-1), expected)
    message.zero_()
    copies()
    assert not stacked.view(torch.uint8).any()


def test_columns_conversions_and_odd_sizes():
    columns, router, odd = torch.zeros(8, 16), torch.zeros(4, 8), torch.zeros(7, dtype=torch.bfloat16)
    sources = torch.randn(8, 4), torch.randn(4, 8).bfloat16(), torch.randn(7).bfloat16()
    Copies([(columns[:, 4:8], sources[0]), (router, sources[1]), (odd, sources[2])])()
    assert torch.equal(columns[:, 4:8], sources[0]) and columns[:, :4].eq(0).all()
    assert torch.equal(router, sources[1].float())
    assert torch.equal(odd, sources[2])


class Other(nn.Linear):
    """The same tensors in another class."""


def model_of(*layers: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embed, model.layers = nn.Embedding(4, 4), nn.ModuleList(nn.Sequential(layer) for layer in layers)
    return model


def test_equal_layers_are_one_kind():
    assert first_layers_by_kind(model_of(*(nn.Linear(4, 8) for _ in range(5)))) == {0}
    assert first_layers_by_kind(nn.Linear(4, 4)) == frozenset()


def test_what_a_loader_could_treat_in_another_way_is_a_kind_of_its_own():
    strided, double, buffered = nn.Linear(4, 8), nn.Linear(4, 8).double(), nn.Linear(4, 8)
    strided.weight = nn.Parameter(torch.zeros(4, 8).t())
    buffered.register_buffer("scale", torch.ones(1))
    plain = [nn.Linear(4, 8) for _ in range(2)]
    layers = [plain[0], nn.Linear(4, 9), strided, double, buffered, Other(4, 8), nn.Linear(4, 8, bias=False), plain[1]]
    assert first_layers_by_kind(model_of(*layers)) == set(range(7))  # the last is as the first


def test_ranks_experts_are_part_of_a_kind():
    layers = [nn.Linear(4, 8) for _ in range(4)]
    for layer, own in zip(layers, ([0, -1], [0, -1], [-1, 0], None), strict=True):
        layer.expert_map = None if own is None else torch.tensor(own)
    assert first_layers_by_kind(model_of(*layers)) == {0, 2, 3}


def test_a_module_that_all_layers_share_makes_no_kind():
    rotary = nn.Module()
    rotary.register_buffer("cos_sin_cache", torch.ones(2))
    model = model_of(*(nn.Linear(4, 8) for _ in range(3)))
    for layer in model.layers:
        layer.rotary = rotary  # found in the first layer alone
    assert first_layers_by_kind(model) == {0}


@pytest.mark.parametrize(
    "name, holder",
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.k_proj.weight_scale_inv", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "model.layers.0.self_attn.fused_qkv_a_proj"),
        ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.q_norm"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj"),
        ("model.layers.0.mlp.down_proj.weight_scale_inv", "model.layers.0.mlp.down_proj"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.experts"),
        ("model.layers.0.block_sparse_moe.experts.7.w2.weight_scale_inv", "model.layers.0.block_sparse_moe.experts"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "model.layers.0.mlp.shared_experts.gate_up_proj"),
        ("lm_head.weight", "lm_head"),
    ],
)
def test_tensors_of_one_module_are_loaded_together(name, holder):
    assert engine_module_of(name) == holder


def test_experts_on_deep_gemm_are_accepted_and_never_replaced_in_small_batches(monkeypatch):
    from vllm.model_executor.layers.fused_moe.experts import triton_deep_gemm_moe as module

    experts = module.TritonOrDeepGemmExperts
    monkeypatch.setattr(experts, "_supports_batch_invariance", staticmethod(lambda: False))
    monkeypatch.setattr(module, "is_deep_gemm_e8m0_used", lambda: False)  # FP32 scales
    both = SimpleNamespace(experts="DeepGEMM", fallback_experts="Triton")
    one = torch.zeros(1, 64)  # neither rows nor columns are enough for vLLM's choice
    assert experts._select_experts_impl(both, one, one[None], one[None]) == "Triton"
    patches.accept_deep_gemm_experts()
    assert experts._supports_batch_invariance()
    assert experts._select_experts_impl(both, one, one[None], one[None]) == "DeepGEMM"


@pytest.mark.parametrize("hidden", [128, 640, 1024, 2944, 4096])
def test_experts_on_deep_gemm_gather_any_hidden_size(hidden, monkeypatch):
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils

    widths = []

    def vllms(input_tensor, recv_topk_ids, recv_topk_weight, input_index, expert_map, output_tensor):
        """Its conditions, and its definition in PyTorch."""
        width = input_tensor.shape[1]
        block = min(width, 1024)
        assert width % block == 0 and block & (block - 1) == 0
        widths.append(width)
        output_tensor.copy_((input_tensor[input_index] * recv_topk_weight[..., None]).sum(1))

    assert inspect.signature(vllms).parameters.keys() == inspect.signature(deep_gemm_utils.ep_gather).parameters.keys()

    monkeypatch.setattr(deep_gemm_utils, "ep_gather", vllms)
    patches.gather_any_hidden_size()
    inputs, weights = torch.randn(6, hidden), torch.rand(3, 2)
    rows, out = torch.tensor([[0, 5], [3, 2], [1, 4]]), torch.full((3, hidden), torch.nan)
    deep_gemm_utils.deepgemm_unpermute_and_reduce(inputs, rows, weights, rows, None, out)  # vLLM's caller
    torch.testing.assert_close(out, (inputs[rows] * weights[..., None]).sum(1), rtol=0, atol=0)
    assert sum(widths) == hidden and len(widths) <= 4


def test_the_v2_sampler_divides_in_float32_and_leaves_other_batches_alone(monkeypatch):
    from types import SimpleNamespace

    import numpy as np
    from vllm.v1.worker.gpu.sample import logprob, sampler, states

    from megatron_fp8rl.kernels import exact_logprobs
    from megatron_fp8rl.rollout.vllm_plugin import vllm_imports

    monkeypatch.setattr(vllm_imports, "batch_invariant", SimpleNamespace)
    monkeypatch.setattr(logprob, "compute_token_logprobs", None)
    monkeypatch.setattr(states, "apply_temperature", None)
    monkeypatch.setattr(sampler.Sampler, "apply_sampling_params", sampler.Sampler.apply_sampling_params)
    patches.make_logprobs_order_independent()
    nothing = SimpleNamespace(**{f"apply_{name}": lambda *_: None for name in ("logit_bias", "penalties", "bad_words")})

    def processed(temperatures: list[float], logits: torch.Tensor) -> torch.Tensor:
        of_requests = states.SamplingStates.__new__(states.SamplingStates)
        values = np.array([9.0, *temperatures], np.float32)
        of_requests.temperature = SimpleNamespace(np=values, gpu=torch.from_numpy(values))
        of_requests.min_p = SimpleNamespace(np=np.zeros(len(values)))
        ours = sampler.Sampler.__new__(sampler.Sampler)
        ours.logprobs_mode, ours.sampling_states = "processed_logprobs", of_requests
        ours.logit_bias_state = ours.penalties_state = ours.bad_words_state = nothing
        requests = np.arange(1, len(values))
        mapping = torch.from_numpy(requests.astype(np.int32))
        return ours.apply_sampling_params(logits, mapping, requests, None, None, None, skip_top_k_top_p=True)

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = logits.clone()
    assert processed([1.0, 0.0, 1.0], plain) is plain and torch.equal(plain, logits)
    actual = processed([0.7, 1.0, 0.0], logits.clone())
    assert torch.equal(actual, torch.cat([exact_logprobs.divided(logits[:1], 0.7), logits[1:].float()]))
