"""The multi-token prediction layer: what it computes, that it trains nothing else, and that checkpoints keep it."""

import json
from dataclasses import replace

import pytest
import torch

from checkpoint_tools import hf_to_megatron
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.workers import WorkerOptions
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import EngineConfig
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.weight_sync.save_hf import save_hf
from tests.dist.test_checkpoint import assert_a_resume_changes_no_bit
from tests.helpers.dist import run_ranks
from tests.helpers.families import MODELS
from tests.helpers.hf_parts import to_hf
from tests.helpers.training import (
    SMOOTH_ADAM,
    VOCAB,
    continue_training,
    first_gradients,
    full_weights,
    make_batch,
    make_loss,
    make_samples,
    run_config,
    train,
)
from tests.tolerances import LAYOUT_WEIGHTS

FAMILIES = ("glm4_moe", "deepseek_v3")


def config(family: str, *, num_drafting: int = 1, **options):
    model = replace(MODELS[family], vocab_size=VOCAB, num_mtp_layers=num_drafting, initializer_range=0.08)
    cfg = run_config(model=model, **options)
    return replace(cfg, engine=EngineConfig(speculation="mtp")) if num_drafting else cfg


@pytest.mark.core
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", [("bf16", "fp32"), ("blockwise", "bf16")], ids=["fp32", "blockwise"])
def test_a_draft_layer_changes_no_gradient_of_the_policy(family, precision):
    trainer, params = precision
    ((plain, _),) = run_ranks(1, first_gradients, config(family, num_drafting=0, trainer=trainer, params=params))
    ((both, _),) = run_ranks(1, first_gradients, config(family, trainer=trainer, params=params))
    drafting = {name for name in both if name.startswith("mtp.")}
    assert both.keys() - drafting == plain.keys() and drafting
    for name, gradient in plain.items():
        assert torch.equal(both[name], gradient), name
    assert all(both[name].any() for name in drafting if ".experts." not in name)
    assert any(both[name].any() for name in drafting if ".experts." in name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"optimizer": "muon", "moe_aux_loss_coef": 0.01}], ids=["adam", "muon"])
def test_a_draft_layer_changes_no_update_of_the_policy(family, options):
    """Gradients of both are clipped, each by its own norm."""
    optim = replace(SMOOTH_ADAM, clip_grad_norm=1e-3, eps=1e-8, **options)
    (plain,) = run_ranks(1, train, config(family, num_drafting=0, optim=optim), 2)
    (both,) = run_ranks(1, train, config(family, optim=optim), 2)
    losses = [after.pop("speculation/draft_loss/mean") for after in both.metrics]
    assert both.metrics == plain.metrics and 1 < losses[1] < losses[0]
    for name, (_, weight) in plain.pieces.items():
        assert torch.equal(both.pieces[name][1], weight), name


def test_a_draft_layer_has_the_same_updates_in_every_layout():
    optim = replace(SMOOTH_ADAM, clip_grad_norm=0.05)
    (one,) = run_ranks(1, train, config("glm4_moe", optim=optim), 2)
    ranks = run_ranks(2, train, config("glm4_moe", optim=optim, world_size=2, expert=2), 2)
    model = config("glm4_moe").model
    weights = full_weights(model, [result.pieces for result in ranks])
    for name, weight in full_weights(model, [one.pieces]).items():
        torch.testing.assert_close(weights[name], weight, **LAYOUT_WEIGHTS, msg=name)
    for got, want in zip(ranks[0].metrics, one.metrics, strict=True):
        assert got["speculation/draft_loss/mean"] == pytest.approx(want["speculation/draft_loss/mean"], rel=1e-5)


def _loss_and_weights(cfg, samples):
    """On a rank: (loss of drafts, weights by the checkpoint's names), with random norms and biases."""
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in policy.named_tensors():
            if tensor.ndim == 1:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + ("norm.weight" in name))
    tensors = dict(policy.named_tensors())
    weights = dict(pair for name, t in tensors.items() for pair in to_hf(name, t.clone(), cfg.model))
    batch = policy.with_old_logprobs(make_batch(cfg, 0, samples))
    return policy.update(batch, make_loss(cfg))["speculation/draft_loss/mean"], weights


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_are_those_of_a_decoder_layer_by_transformers(family, tmp_path):
    import transformers
    from safetensors.torch import save_file

    cfg, samples = config(family), make_samples(6, seed=0)
    assert any(len(sample.segments[0].token_ids) == 1 for sample in samples)  # no draft for the token after it
    ((actual, weights),) = run_ranks(1, _loss_and_weights, cfg, samples)
    num_layers = cfg.model.num_layers
    save_file({name: x.contiguous().clone() for name, x in weights.items()}, tmp_path / "model.safetensors")
    described = registry.to_hf_config(replace(cfg.model, num_layers=num_layers + 1, num_mtp_layers=0))
    (tmp_path / "config.json").write_text(json.dumps(described))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    inner, layers, head = reference.model, list(reference.model.layers), reference.lm_head
    own = f"model.layers.{num_layers}."

    def normed(x, name):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[f"{own}{name}.weight"], cfg.model.norm_eps)

    total, num_tokens = 0.0, 0
    with torch.no_grad():
        for sample in samples:
            tokens = torch.tensor([*sample.token_ids])
            inner.layers = torch.nn.ModuleList(layers[:num_layers])
            states = inner(tokens[None, :-2], use_cache=False).last_hidden_state
            embedded = inner.embed_tokens(tokens[None, 1:-1])
            embedded[:, 0] = 0.0
            both = torch.cat([normed(embedded, "enorm"), normed(states, "hnorm")], dim=-1)
            both = both @ weights[own + "eh_proj.weight"].T
            inner.layers, norm = torch.nn.ModuleList(layers[num_layers:]), inner.norm
            inner.norm = torch.nn.Identity()
            drafted = inner(inputs_embeds=both, use_cache=False).last_hidden_state
            inner.norm = norm
            logits = head(normed(drafted, "shared_head.norm"))[0] / cfg.sampling.temperature
            logprobs = logits.log_softmax(-1).gather(1, tokens[2:, None])[:, 0]
            num_prompt = len(sample.segments[0].token_ids)
            total -= float(logprobs[max(0, num_prompt - 2) :].sum())
            num_tokens += len(tokens) - num_prompt
    assert actual == pytest.approx(total / num_tokens, rel=1e-5)


@pytest.mark.parametrize("layout", [{}, dict(world_size=2, expert=2)], ids=["one", "ep2"])
def test_a_resume_continues_the_draft_layer(layout, tmp_path):
    assert_a_resume_changes_no_bit(config("glm4_moe", trainer="delayed", params="bf16", **layout), tmp_path)


def _export(cfg, folder, tokenizer) -> list:
    """On a rank: all tensors of a trained policy, which is exported."""
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    continue_training(policy, 1)
    save_hf(policy, folder, tokenizer)
    return [(name, tensor.clone()) for name, tensor in policy.named_tensors()]


def _tensors(cfg):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    return {name: tensor.clone() for name, tensor in policy.named_tensors()}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_draft_layer_is_read_again_also_after_a_conversion(family, tmp_path):
    cfg, tokenizer, folder = config(family, params="bf16"), tmp_path / "tokenizer", tmp_path / "hf"
    character_tokenizer().save_pretrained(tokenizer)
    (saved,) = run_ranks(1, _export, cfg, str(folder), str(tokenizer))
    assert any(name.startswith("mtp.layers.0.eh_proj") for name, _ in saved)
    hf_to_megatron.convert(HfFolder.open(folder, keep_mtp=True), tmp_path / "megatron", WorkerOptions(workers=1))
    for source in (folder, tmp_path / "megatron"):
        again = replace(cfg, model=replace(cfg.model, hf_path=str(source)))
        (read,) = run_ranks(1, _tensors, again)
        for name, tensor in saved:
            assert torch.equal(tensor, read[name]), f"{name} of {source.name}"
    stored = model_in(folder, with_drafts=True)
    assert stored.num_mtp_layers == 1 and model_in(folder).num_mtp_layers == 0
