"""Teachers on gloo ranks and behind a server: their log-probabilities, the loss, and teachers that do not fit."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_tools import hf_to_fp8
from megatron_fp8rl.algo.load_function import load_loss
from megatron_fp8rl.commands.distill import DistillOptions, configure
from megatron_fp8rl.config import (
    CheckpointConfig,
    ConfigError,
    LoraConfig,
    ObserveConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.distill import Distillation, run
from megatron_fp8rl.observe.recording import RolloutWriter
from megatron_fp8rl.preflight import teachers
from megatron_fp8rl.rollout.teacher_client import ServedTeacher, TeacherError
from megatron_fp8rl.runtime.stop import RunStopped
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer.frozen import FrozenPolicy
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup, Sample, Segment, single_turn
from tests.dist.test_supervised import _StopBefore, lines
from tests.helpers.dist import run_ranks
from tests.helpers.own_model import make_model

OTHER = ("train/1#0", "train/4#0", "train/5#0")  # samples of the second source, where there are two
FP32 = PrecisionConfig(trainer="bf16", rollout="bf16", params="fp32", exact=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    for name in ("student", "teacher"):
        make_model(folder / name, ["How many apples has Tom?"])
    (folder / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return folder


def config(
    folder: Path,
    teacher: str,
    precision: PrecisionConfig = FP32,
    kind: str = "sampled",
    top_k: int = 8,
    **parallel: int,
) -> RunConfig:
    data = (str(folder / "train.jsonl"),)
    options = DistillOptions(model=str(folder / "student"), data=data, teacher=(teacher,), gpus=0)
    cfg, _ = configure(options, lambda cfg: replace(cfg, precision=precision))
    assert (
        cfg.algo.kl_coef == 1 and cfg.data.environments[0].teacher == teacher and not cfg.data.environments[0].rewards
    )
    sampling = replace(cfg.sampling, max_prompt_tokens=16, max_completion_tokens=16)
    algo = replace(cfg.algo, teacher_kl=kind, teacher_top_k=top_k)
    return replace(
        cfg, parallel=ParallelConfig(**parallel), sampling=sampling, algo=algo, output_dir=str(folder / "run")
    )


def samples(rollout: dict[str, np.ndarray] | None = None) -> list[Sample]:
    rng, made = np.random.default_rng(0), []
    for index in range(6):
        prompt, answer = (TokenArray.from_ids(rng.integers(3, 384, n).tolist()) for n in (3 + index, 9 - index))
        logprobs = None if rollout is None else TokenArray.from_floats(rollout[f"train/{index}#0"])
        segments = (Segment(prompt), Segment(answer, logprobs, is_trained=True))
        made.append(Sample(name=f"train/{index}#0", environment="train", segments=segments))
    return made


def distributions(model: Path) -> dict[str, torch.Tensor]:
    """Log-probabilities of all tokens at the trained tokens, by transformers in FP32."""
    net, logprobs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), {}
    for sample in samples():
        with torch.no_grad():
            logits = net(torch.tensor(sample.token_ids.array.tolist())[None]).logits[0]
        logprobs[sample.name] = logits[sample.num_prompt_tokens - 1 : -1, :384].log_softmax(
            -1
        )  # of the student's tokens
    return logprobs


def reference(model: Path) -> dict[str, np.ndarray]:
    """Log-probabilities of the trained tokens, by transformers in FP32."""
    ids = {
        sample.name: torch.tensor(sample.token_ids.array[sample.num_prompt_tokens :].tolist()) for sample in samples()
    }
    return {name: x.gather(1, ids[name][:, None])[:, 0].numpy() for name, x in distributions(model).items()}


def divergences(student: Path, teacher: Path, top_k: int = 0) -> dict[str, float]:
    """Sum over trained tokens of the reverse KL: over the teacher's ``top_k`` tokens and all others; 0: over all."""
    sums, taught = {}, distributions(teacher)
    for name, p in distributions(student).items():
        pair = (p.double(), taught[name].double())
        if top_k:
            ids = pair[1].topk(top_k).indices
            best = [x.gather(1, ids) for x in pair]
            pair = [torch.cat([x, torch.log1p(-x.exp().sum(-1, keepdim=True))], dim=1) for x in best]
        sums[name] = float((pair[0].exp() * (pair[0] - pair[1])).sum())
    return sums


def _score(cfg: RunConfig) -> dict[str, np.ndarray]:
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    teacher = FrozenPolicy.build(teachers.student_of(cfg, cfg.data.environments[0].teacher), parallel)
    return teacher.sample_logprobs(samples() if parallel.rank == 0 else [])


def test_a_teacher_in_a_folder_scores_as_transformers_does_in_every_layout(folder: Path):
    expected = reference(folder / "teacher")
    for layout in ({"world_size": 2}, {"world_size": 2, "tensor": 2}):
        for actual in run_ranks(2, _score, config(folder, str(folder / "teacher"), **layout)):
            assert actual.keys() == expected.keys()
            for name, values in actual.items():
                np.testing.assert_allclose(values, expected[name], atol=3e-5)


def _update(
    cfg: RunConfig, of_other: tuple[str, ...] = (), parallel: Parallel | None = None
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of an update of the student on samples with its own log-probabilities, and these; some samples are of
    the source ``other``."""
    parallel = parallel or Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel, has_reference=Distillation.has_reference)
    assert policy.reference is None
    sampled = FrozenPolicy.build(cfg, parallel).sample_logprobs(samples() if parallel.rank == 0 else [])
    job = Distillation.__new__(Distillation)
    job.cfg, job.parallel, job._names = cfg, parallel, teachers.teachers_of(cfg.data)
    job._teachers = {name: job._build(name) for name in job._names.values()}
    taken = [replace(x, environment="other") if x.name in of_other else x for x in samples(sampled)]
    batches = pack_for(cfg, taken, data_rank=parallel.dp_rank)
    (batch,) = job.with_reference(taken if parallel.rank == 0 else [], batches)
    return policy.update(batch, load_loss(cfg.algo)), sampled


def test_the_loss_of_a_student_that_equals_its_teacher_is_zero(folder: Path):
    exact = PrecisionConfig(exact=True)  # FP8 at both ends
    (of_kind,) = run_ranks(1, _of_kinds, config(folder, str(folder / "student"), exact))
    assert list(of_kind) == ["sampled", "top_k", "full"]
    for metrics in of_kind.values():
        assert metrics["train/loss/mean"] == metrics["loss/kl_ref/mean"] == metrics["train/grad_norm/max"] == 0


def test_the_loss_is_the_reverse_kl_of_the_sampled_tokens(folder: Path):
    (result,) = run_ranks(1, _update, config(folder, str(folder / "teacher")))
    metrics, sampled = result
    taught = reference(folder / "teacher")
    difference = np.concatenate([taught[name] - sampled[name] for name in taught]).astype(np.float64)
    estimate = (np.expm1(difference) - difference).mean()  # of KL(student || teacher), Schulman's k3
    assert metrics["loss/kl_ref/mean"] == pytest.approx(estimate, rel=1e-4)
    assert metrics["train/loss/mean"] == pytest.approx(estimate, rel=1e-4) and metrics["train/grad_norm/max"] > 0


KINDS = {"top_k": 8, "full": 0}


def _of_kinds(
    cfg: RunConfig, of_other: tuple[str, ...] = (), parallel: Parallel | None = None
) -> dict[str, dict[str, float]]:
    parallel = parallel or Parallel.init(cfg.parallel, deadline_s=60)
    kinds = KINDS if cfg.precision == FP32 else ("sampled", *KINDS)
    cfgs = {kind: replace(cfg, algo=replace(cfg.algo, teacher_kl=kind)) for kind in kinds}
    return {kind: _update(of_kind, of_other, parallel)[0] for kind, of_kind in cfgs.items()}


def test_the_loss_is_the_reverse_kl_of_the_distributions_in_every_layout(folder: Path):
    total = sum(sample.num_loss_tokens for sample in samples())
    means = {
        kind: sum(divergences(folder / "student", folder / "teacher", top_k).values()) / total
        for kind, top_k in KINDS.items()
    }
    norms: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for layout in ({"tensor": 2}, {"context": 2}, {"pipeline": 2}):
        cfg = config(folder, str(folder / "teacher"), world_size=2, **layout)
        for of_kind in run_ranks(2, _of_kinds, cfg):
            for kind, metrics in of_kind.items():
                assert metrics["loss/kl_ref/mean"] == pytest.approx(means[kind], rel=2e-4), (layout, kind)
                assert metrics["train/loss/mean"] == pytest.approx(means[kind], rel=2e-4), (layout, kind)
                norms[kind].append(metrics["train/grad_norm/max"])
    for values in norms.values():
        assert min(values) > 0.01 and values == pytest.approx([values[0]] * 6, rel=1e-4)


def test_a_teacher_may_have_more_tokens_which_do_not_count(folder: Path, tmp_path: Path):
    shutil.copytree(folder / "teacher", tmp_path / "larger")
    net = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.bfloat16)
    net.resize_token_embeddings(400)
    net.save_pretrained(tmp_path / "larger")
    total = sum(sample.num_loss_tokens for sample in samples())
    for kind, layout in (("full", {}), ("top_k", {"world_size": 2, "tensor": 2})):
        cfg = config(folder, str(tmp_path / "larger"), kind=kind, **layout)
        assert not teachers.violations(cfg)
        expected = sum(divergences(folder / "student", tmp_path / "larger", KINDS[kind]).values()) / total
        for metrics, _ in run_ranks(cfg.parallel.world_size, _update, cfg):
            assert metrics["loss/kl_ref/mean"] == pytest.approx(expected, rel=2e-4), kind


def _with_adapters(cfg: RunConfig) -> tuple[dict[str, dict[str, float]], bool]:
    """Metrics by kind, and whether a batch gets log-probabilities of the base, which a distillation does not read."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    of_kind = _of_kinds(cfg, (), parallel)
    policy = Policy.build(cfg, parallel, has_reference=Distillation.has_reference)
    (batch,) = pack_for(cfg, samples(), data_rank=parallel.dp_rank)
    return of_kind, policy.with_old_logprobs(batch).microbatches[0].ref_logprobs_T is not None


def test_adapters_on_a_frozen_head_learn_from_the_distributions(folder: Path):
    total = sum(sample.num_loss_tokens for sample in samples())
    cfg = replace(config(folder, str(folder / "teacher"), world_size=2, tensor=2), lora=LoraConfig(rank=4))
    for of_kind, has_base in run_ranks(2, _with_adapters, cfg):
        assert not has_base
        for kind, top_k in KINDS.items():
            expected = sum(divergences(folder / "student", folder / "teacher", top_k).values()) / total
            assert of_kind[kind]["loss/kl_ref/mean"] == pytest.approx(expected, rel=2e-4)  # adapters start at 0
            assert of_kind[kind]["train/grad_norm/max"] > 0.001


def _two_sources(folder: Path, first: str, second: str) -> RunConfig:
    cfg = config(folder, first, kind="top_k")
    (source,) = cfg.data.environments
    (folder / "other.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n')
    other = replace(source, dataset=str(folder / "other.jsonl"), teacher=second)
    return replace(cfg, data=replace(cfg.data, environments=(source, other)))


def test_each_source_has_its_teacher(folder: Path):
    student, teacher = folder / "student", folder / "teacher"
    total = sum(sample.num_loss_tokens for sample in samples())
    (of_kind,) = run_ranks(1, _of_kinds, _two_sources(folder, str(teacher), str(student)), OTHER)
    for kind, top_k in KINDS.items():
        parts = divergences(student, teacher, top_k)
        expected = sum(x for name, x in parts.items() if name not in OTHER) / total  # the student teaches the others
        assert of_kind[kind]["loss/kl_ref/mean"] == pytest.approx(expected, rel=2e-4)
    with server(teacher) as url:
        (result,) = run_ranks(1, _update, _two_sources(folder, str(teacher), url), OTHER)
    expected = sum(divergences(student, teacher, KINDS["top_k"]).values()) / total
    assert result[0]["loss/kl_ref/mean"] == pytest.approx(expected, rel=2e-4)


def _recorded(folder: Path, num_steps: int) -> Path:
    """Rollouts of two sources with rewards, as a run records them; the same tokens in every step."""
    recording = folder / "rollouts"
    with closing(RolloutWriter(recording)) as writer:
        for step in range(1, num_steps + 1):
            groups, rng = [], np.random.default_rng(1)
            for environment in ("train", "other"):
                ids = tuple(rng.integers(3, 384, 5).tolist())
                name = f"{environment}/{step - 1}"
                prompt = Prompt(prompt_id=name, environment=environment, token_ids=ids, text="?", answer="2")
                rollouts = []
                for index, reward in enumerate((1.0, 0.0)):
                    answer = tuple(rng.integers(3, 384, 6).tolist())
                    completion = Completion(
                        token_ids=answer,
                        rollout_logprobs=(-5.9,) * 6,
                        finish_reason="stop",
                        min_version=step - 1,
                        max_version=step - 1,
                        version_spans=((0, step - 1),),
                    )
                    branches = single_turn(prompt, completion)
                    rollout = Rollout(
                        prompt=prompt, index=index, branches=branches, reward=reward, status="scored", seed=index
                    )
                    rollouts.append(rollout)
                groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)))
            writer.write(step, groups)
    return recording


def _run(cfg: RunConfig, stop_before: int = 0) -> None:
    """The whole job on a rank, or until it is asked to stop before a step."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    try:
        run(cfg, parallel, Path(cfg.model.hf_path), None, _StopBefore(stop_before))
    except RunStopped:
        assert stop_before


def test_a_run_with_an_fp8_and_a_bf16_teacher_and_rewards_resumes_bit_for_bit(folder: Path, tmp_path: Path):
    options = hf_to_fp8.Options(source=str(folder / "teacher"), target=str(tmp_path / "fp8"))
    assert hf_to_fp8.run(options) == 0
    base = _two_sources(folder, str(tmp_path / "fp8"), str(folder / "teacher"))
    base = replace(
        base,
        num_steps=3,
        algo=replace(base.algo, teacher_kl="full"),
        optim=replace(base.optim, lr=1e-3),
        sampling=replace(
            base.sampling, replay=str(_recorded(tmp_path, 3)), prompts_per_step=2, completions_per_prompt=2
        ),
        observe=ObserveConfig(display="none", eval_prompts=0),
        checkpoint=CheckpointConfig(every_steps=1, keep=3),
    )
    assert not teachers.violations(base)
    teachers.check(base, str(folder / "student"))
    runs = {name: replace(base, output_dir=str(tmp_path / name)) for name in ("whole", "cut", "alone")}
    runs["alone"] = replace(runs["alone"], algo=replace(base.algo, advantage="tests.dist.test_distillation:no_reward"))
    for name, stop_before in (("whole", 0), ("cut", 3), ("cut", 0), ("alone", 0)):
        run_ranks(1, _run, runs[name], stop_before)
    rows = {name: lines(cfg) for name, cfg in runs.items()}
    assert list(rows["whole"]) == list(rows["cut"]) == [0, 1, 2, 3]
    timed = {"train/tokens_per_s/mean": 0}
    for step, row in rows["whole"].items():
        assert {**row, **timed} == {**rows["cut"][step], **timed}, step
    weights = [(Path(runs[name].run_dir) / "hf" / "model.safetensors").read_bytes() for name in runs]
    assert weights[0] == weights[1] != weights[2]
    for step in (1, 2, 3):
        alone, both = rows["alone"][step], rows["whole"][step]
        assert alone["train/loss/mean"] == pytest.approx(alone["loss/kl_ref/mean"], rel=1e-6)
        assert both["train/grad_norm/max"] != alone["train/grad_norm/max"] > 0
    kl = [row["loss/kl_ref/mean"] for row in list(rows["alone"].values())[1:]]
    assert kl[2] < kl[0]


def no_reward(rewards):
    return [0.0] * len(rewards)


@contextmanager
def server(model: Path, window: int = 512, tokens: list[int] | None = None) -> Iterator[str]:
    """vLLM's routes for ``model``, by transformers."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)

    class Routes(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({"data": [{"id": "the teacher", "max_model_len": window}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "the teacher"
            if self.path == "/tokenize":
                return self.reply({"tokens": tokens or tokenizer.encode(body["prompt"], add_special_tokens=False)})
            ids = torch.tensor(body["prompt"])
            with torch.no_grad():
                logprobs = net(ids[None]).logits[0].log_softmax(-1)
            if (num := body["prompt_logprobs"]) > 20:
                return self.reply({"error": "Requested prompt logprobs of 64, greater than max allowed: 20"}, 400)
            entries = [
                {str(x): {"logprob": row[x].item()} for x in {*row.topk(num).indices.tolist(), token}}
                for token, row in zip(ids[1:].tolist(), logprobs, strict=False)
            ]
            self.reply({"choices": [{"prompt_logprobs": [None, *entries]}]})

        def reply(self, content, status=200):
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Routes)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{served.server_port}/v1"
    finally:
        served.shutdown()


class _OneRank:
    rank = 0

    @staticmethod
    def broadcast_object(value):
        return value


def test_a_teacher_behind_a_url_scores_the_same_tokens(folder: Path):
    expected = reference(folder / "teacher")
    with server(folder / "teacher") as url:
        teachers.check(config(folder, url), str(folder / "student"))
        actual = ServedTeacher(url, 10.0, _OneRank()).sample_logprobs(samples())
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=1e-5)


def test_teachers_that_do_not_fit_are_refused(folder: Path, tmp_path: Path):
    make_model(tmp_path / "other", ["Completely different words, and so other merges"])
    with pytest.raises(ConfigError, match=r"environments.0.teacher = '.*other': has another tokenizer"):
        teachers.check(config(folder, str(tmp_path / "other")), str(folder / "student"))
    with pytest.raises(ConfigError, match=r"1 mistake.*\n.*environments.1.teacher = '.*other': has another tokenizer"):
        teachers.check(_two_sources(folder, str(folder / "teacher"), str(tmp_path / "other")), str(folder / "student"))
    with server(folder / "teacher", tokens=[1, 2]) as url, pytest.raises(ConfigError, match="another tokenizer"):
        teachers.check(config(folder, url), str(folder / "student"))
    with server(folder / "teacher", window=8) as url, pytest.raises(ConfigError, match="reads 8 tokens"):
        teachers.check(config(folder, url), str(folder / "student"))
    shutil.copytree(folder / "teacher", tmp_path / "small")
    written = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps({**written, "vocab_size": 256}))
    fits = config(folder, str(folder / "teacher"))
    for teacher, message in (
        (str(tmp_path / "small"), "has 256 tokens, and the student has 384"),
        (str(tmp_path / "none"), "is not a folder with config.json"),
        ("", None),
    ):
        source = replace(fits.data.environments[0], teacher=teacher)
        (*errors,) = teachers.violations(replace(fits, data=replace(fits.data, environments=(source,))))
        assert [error.problem for error in errors] == ([] if message is None else [message])
    hot = replace(fits, sampling=replace(fits.sampling, temperature=0.7))
    source = replace(fits.data.environments[0], teacher="http://host/v1")
    (error,) = teachers.violations(replace(hot, data=replace(hot.data, environments=(source,))))
    assert error.problem == "a server scores at temperature 1, and sampling.temperature is 0.7"
    (error,) = teachers.violations(replace(fits, algo=replace(fits.algo, kl_coef=0.0)))
    assert error.field == "--algo.kl_coef"


def test_divergences_that_a_teacher_cannot_give_are_refused(folder: Path, tmp_path: Path):
    with server(folder / "teacher") as url:
        (error,) = teachers.violations(config(folder, url, kind="full"))
        assert error.problem == "a server returns a few tokens, not the full vocabulary"
        teachers.check(config(folder, url, kind="top_k"), str(folder / "student"))
        with pytest.raises(
            ConfigError, match="--algo.teacher_top_k = 64: .* max allowed: 20.*Start vllm serve with --max"
        ):
            teachers.check(config(folder, url, kind="top_k", top_k=64), str(folder / "student"))
    for top_k in (0, 384):
        (error,) = teachers.violations(config(folder, str(folder / "teacher"), kind="top_k", top_k=top_k))
        assert str(error).startswith(f"--algo.teacher_top_k = {top_k}: is not between 1 and 383")
    alone = config(folder, str(folder / "teacher"), kind="full")
    source = replace(alone.data.environments[0], teacher="")
    (error,) = teachers.violations(replace(alone, data=replace(alone.data, environments=(source,))))
    assert str(error) == "--algo.teacher_kl = 'full': there is no teacher. Use distill, or set sampled."
    shutil.copytree(folder / "teacher", tmp_path / "larger")
    written = json.loads((tmp_path / "larger" / "config.json").read_text())
    (tmp_path / "larger" / "config.json").write_text(json.dumps({**written, "vocab_size": 512}))
    larger = config(folder, str(tmp_path / "larger"), kind="full", world_size=2, tensor=2)
    (error,) = teachers.violations(larger)
    assert "has 512 tokens, and the student has 384: tensor-parallel ranks" in error.problem
    assert not teachers.violations(replace(larger, algo=replace(larger.algo, teacher_kl="top_k")))


def test_a_server_that_does_not_answer_names_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_fp8rl.rollout.teacher_client._WAITS_S", (0.0,))
    with pytest.raises(TeacherError, match="http://127.0.0.1:9/v1/models: .*refused"):
        ServedTeacher("http://127.0.0.1:9", 1.0, _OneRank()).sample_logprobs(samples())
