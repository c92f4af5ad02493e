"""The policy: the same function, gradient and update in every layout, and the same as transformers' model.

Layouts are compared in FP32 without FP8, where only the order of sums differs.
"""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import AlgoConfig, OptimConfig
from megatron_fp8rl.data.packing import pack
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer.optimizer.optimizer import NonFiniteError, learning_rate
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import LossInputs, TrainBatch
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.training import (
    DENSE,
    MOE,
    SMOOTH_ADAM,
    first_gradients,
    full_weights,
    make_batch,
    make_loss,
    make_samples,
    run_config,
    token_values,
    train,
    weight_pieces,
)
from tests.tolerances import LAYOUT_FLOAT32, LAYOUT_WEIGHTS, TRANSFORMERS_FLOAT32

MIXED = replace(MOE, first_dense_layers=1, ffn_hidden_size=96, num_shared_experts=1)
LAYOUTS = {
    "small_microbatches": dict(max_tokens=32),
    "recompute_full": dict(optim=replace(SMOOTH_ADAM, recompute="full", logprob_chunk_tokens=7)),
    "tp2": dict(world_size=2, tensor=2),
    "ep2": dict(world_size=2, expert=2),
    "tp2_ep2_etp1": dict(world_size=2, tensor=2, expert=2),
    "tp2_ep2_etp2": dict(world_size=4, tensor=2, expert=2, expert_tensor=2),
    "pp2": dict(world_size=2, pipeline=2),
    "pp2_vpp2": dict(world_size=2, pipeline=2, virtual_stages=2),
    "cp2": dict(world_size=2, context=2),
    "dp2": dict(world_size=2),
    "dp2_overlap": dict(world_size=2, max_tokens=32, optim=replace(SMOOTH_ADAM, overlap_grad_reduce=True)),
    "tp2_cp2_ep2": dict(world_size=4, tensor=2, context=2, expert=2),
    "dense_tp2_pp2": dict(world_size=4, model=DENSE, tensor=2, pipeline=2),
    "dense_tied_pp2": dict(world_size=2, model=replace(DENSE, tie_embeddings=True), pipeline=2),
}


@pytest.fixture(scope="module")
def one_rank():
    known = {}

    def get(model):
        if model not in known:
            (known[model],) = run_ranks(1, train, run_config(model=model))
        return known[model]

    return get


@pytest.mark.parametrize(
    "layout", [pytest.param("tp2_ep2_etp1", marks=pytest.mark.core), *sorted({*LAYOUTS} - {"tp2_ep2_etp1"})]
)
def test_layout_does_not_matter(layout, one_rank):
    cfg = run_config(**LAYOUTS[layout])
    expected = one_rank(cfg.model)
    ranks = run_ranks(cfg.parallel.world_size, train, cfg)
    for result in ranks:
        assert result.metrics == ranks[0].metrics, "ranks report different metrics"
        for name, values in result.old_logprobs.items():
            torch.testing.assert_close(values, expected.old_logprobs[name], **LAYOUT_FLOAT32, msg=name)
    covered = {name for result in ranks for name in result.old_logprobs}
    assert covered == expected.old_logprobs.keys()
    for got, want in zip(ranks[0].metrics, expected.metrics, strict=True):
        for key in ("train/loss/mean", "train/grad_norm/max", "train/entropy/mean", "loss/update_ratio/max"):
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
    _assert_same_weights(cfg.model, [result.pieces for result in ranks], [expected.pieces])


def _assert_same_weights(model, ranks, expected):
    weights, wanted = full_weights(model, ranks), full_weights(model, expected)
    if model.tie_embeddings:  # the last of several stages holds a copy
        copy = weights.pop("output_layer.weight", wanted["embedding.word_embeddings.weight"])
        assert torch.equal(copy, weights["embedding.word_embeddings.weight"])
    assert weights.keys() == wanted.keys() == set(registry.weights(model))
    for name, weight in weights.items():
        torch.testing.assert_close(weight, wanted[name], **LAYOUT_WEIGHTS, msg=name)


def _fp8_state(policy):
    return {
        name: buffer.clone() for model in policy.models for name, buffer in model.named_buffers() if ".fp8." in name
    }


@pytest.mark.parametrize(
    "trainer, model, layout",
    [
        ("bf16", MOE, {}),
        ("delayed", MOE, {}),
        ("blockwise", MOE, dict(world_size=2, tensor=2, expert=2)),
        ("blockwise", DENSE, dict(world_size=2, pipeline=2, virtual_stages=2)),
        ("blockwise", MIXED, dict(world_size=2, context=2)),
    ],
    ids=["bf16", "delayed", "tp2_ep2", "dense_vpp2", "shared_cp2"],
)
def test_recompute_changes_no_bit(trainer, model, layout):
    def gradients(**optim):
        cfg = run_config(model=model, trainer=trainer, params="bf16", optim=OptimConfig(**optim), **layout)
        return run_ranks(cfg.parallel.world_size, first_gradients, cfg, _fp8_state)

    expected = gradients()
    for options in (
        dict(recompute="full"),
        dict(recompute="selective"),
        dict(recompute="selective", recompute_modules=("core_attn",)),
    ):
        for (gradient, state), (actual, found_state) in zip(expected, gradients(**options), strict=True):
            assert any(value.any() for value in gradient.values())
            for name, value in (gradient | state).items():
                assert torch.equal((actual | found_state)[name], value), f"{name} with {options}"


def _states_around_passes(cfg):
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    states, ratios = [], []
    for _ in range(2):
        states.append(_fp8_state(policy))
        batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank))
        states.append(_fp8_state(policy))
        metrics = policy.update(batch, make_loss(cfg))
        ratios += [metrics["loss/update_ratio/mean"], metrics["loss/update_ratio/max"]]
    return states, ratios, policy.models[0].training


@pytest.mark.parametrize("trainer", ["bf16", "blockwise", "delayed"])
def test_old_logprobs_are_those_of_the_update(trainer):
    """With and without gradients; the first pass does not change delayed scaling."""
    (states, ratios, training), *_ = run_ranks(1, _states_around_passes, run_config(trainer=trainer, params="bf16"))
    assert ratios == [1.0] * 4
    assert training
    before, after_old, updated, after_second_old = states
    for name in before:
        assert torch.equal(before[name], after_old[name]), name
        assert torch.equal(updated[name], after_second_old[name]), name
    if trainer == "delayed":
        histories = [name for name in before if name.endswith("history")]
        assert histories and all(updated[name][0].any() for name in histories)


def _against_transformers(cfg, folder):
    """On a rank: log-probabilities, loss, gradient norm and weights of one update from a Hugging Face checkpoint."""
    cfg = replace(cfg, model=replace(cfg.model, hf_path=folder))
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank))
    old = token_values(batch, [mb.old_logprobs_T for mb in batch.microbatches])
    return old, policy.update(batch, make_loss(cfg))


def _save_random_model(model, folder):
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in registry.hf_tensors(model).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(registry.to_hf_config(model)))
    return AutoModelForCausalLM.from_pretrained(
        folder, config=AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    )


@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
def test_same_as_transformers(model, tmp_path):
    """Old log-probabilities of packed ragged sequences, and the gradient norm."""
    reference = _save_random_model(model, tmp_path)
    cfg = run_config(model=model, world_size=2, tensor=2, expert=2 if model.is_moe else 1)
    batch: TrainBatch = make_batch(replace(cfg, parallel=replace(cfg.parallel, world_size=1, tensor=1, expert=1)), 0)

    def logprobs(mb):
        """[T] by running every sequence alone, without its padding."""
        log_p, entropy = [], []
        bounds = mb.cu_seqlens_S.tolist()
        for start, end in itertools.pairwise(bounds):
            logits = reference(input_ids=mb.tokens_T[None, start:end]).logits[0].float() / cfg.sampling.temperature
            every = torch.log_softmax(logits, dim=-1)
            log_p.append(every.gather(1, mb.targets_T[start:end, None])[:, 0])
            entropy.append(-(every.exp() * every).sum(-1))
        return torch.cat(log_p), torch.cat(entropy)

    values = [logprobs(mb) for mb in batch.microbatches]
    old = token_values(batch, [log_p for log_p, _ in values])
    filled = replace(
        batch,
        microbatches=tuple(
            replace(mb, old_logprobs_T=log_p.detach())
            for mb, (log_p, _) in zip(batch.microbatches, values, strict=True)
        ),
    )
    loss = sum(
        make_loss(cfg)(
            LossInputs(
                mb=mb,
                batch=filled,
                trainer_logprobs_T=log_p,
                entropy_T=entropy,
                cfg=cfg.algo,
                max_completion_tokens=cfg.sampling.max_completion_tokens,
            )
        )[0]
        for mb, (log_p, entropy) in zip(filled.microbatches, values, strict=True)
    )
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters() if p.grad is not None]).norm().item()

    for got, metrics in run_ranks(2, _against_transformers, cfg, str(tmp_path)):
        assert got.keys() == old.keys()
        for name, values_C in got.items():
            torch.testing.assert_close(values_C, old[name], **TRANSFORMERS_FLOAT32, msg=name)
        assert metrics["train/loss/mean"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-5)
        assert metrics["train/grad_norm/max"] == pytest.approx(norm, rel=1e-4)


def _with_reference(cfg):
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    passes = []
    for _ in range(2):
        batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank))
        passes.append([(mb.old_logprobs_T, mb.ref_logprobs_T) for mb in batch.microbatches])
        kl = policy.update(batch, make_loss(cfg))["loss/kl_ref/mean"]
    return passes, kl


def test_reference_model_stays_where_the_policy_started():
    cfg = run_config(world_size=2, pipeline=2, algo=AlgoConfig(kl_coef=0.1))
    for passes, kl in run_ranks(2, _with_reference, cfg):
        first, second = passes
        for (old, ref), (old_later, ref_later) in zip(first, second, strict=True):
            assert torch.equal(old, ref) and torch.equal(ref, ref_later)
            assert not torch.equal(old_later, ref_later)
        assert kl > 0


def _fails_with(cfg, breakage):
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel)
    before = weight_pieces(policy)
    loss_fn = make_loss(cfg)
    if breakage == "gradient" and parallel.dp_rank == 1:
        broken = dict(policy.named_parameters())["decoder.layers.2.mlp.router.weight"]
        broken.register_hook(lambda gradient: gradient * float("inf"))

    def loss(inputs):
        value, metrics = loss_fn(inputs)
        return (value * float("nan") if breakage == "loss" and "sample3" in inputs.mb.names else value), metrics

    try:
        policy.update(policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank)), loss)
    except NonFiniteError as error:
        after = weight_pieces(policy)
        assert all(torch.equal(before[name][1], after[name][1]) for name in before), "the weights moved"
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("breakage", "named"), [("loss", "sample3"), ("gradient", "decoder.layers.2.mlp.router.weight")]
)
def test_non_finite_values_stop_all_ranks_by_name(breakage, named):
    messages = run_ranks(2, _fails_with, run_config(world_size=2), breakage)
    assert messages[0] == messages[1]
    assert named in messages[0] and "rank" in messages[0] and "not applied" in messages[0]
    if breakage == "gradient":
        assert messages[0].count(".weight on rank") <= 2, "names more than the broken gradient"


def _decay_only(cfg):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    before = weight_pieces(policy)
    policy.update(make_batch(cfg, 0), lambda inputs: (0.0 * inputs.trainer_logprobs_T.sum(), {}))
    return before, weight_pieces(policy)


def test_weight_decay_spares_norms():
    before, after = run_ranks(1, _decay_only, run_config())[0]
    factor = 1 - SMOOTH_ADAM.lr * SMOOTH_ADAM.weight_decay
    for name, (_, weight) in before.items():
        expected = weight * factor if weight.dim() > 1 else weight
        torch.testing.assert_close(after[name][1], expected, rtol=1e-6, atol=0, msg=name)


def test_learning_rate():
    def rates(**options):
        optim = OptimConfig(lr=8.0, **options)
        return [learning_rate(optim, update, 8) for update in range(1, 10)]

    assert rates() == [8.0] * 9
    assert rates(warmup_steps=4) == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    assert rates(warmup_steps=4, decay="linear", min_lr=4.0) == [2.0, 4.0, 6.0, 8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    assert rates(decay="cosine")[3] == pytest.approx(4.0) and rates(decay="cosine")[7:] == pytest.approx([0.0, 0.0])


def test_unaligned_microbatch_is_refused():
    with pytest.raises(RankError, match="do not divide over 1 context-parallel and 2 tensor-parallel"):
        run_ranks(2, _unaligned, run_config(world_size=2, tensor=2))


def _unaligned(cfg):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    odd = [sample for sample in make_samples() if len(sample.token_ids) % 2][:1]
    policy.with_old_logprobs(pack(odd, data_size=1, data_rank=0, max_tokens=96, alignment=1)[0])
