"""Teachers on gloo ranks and behind a server: their log-probabilities, the loss, and teachers that do not fit."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_fp8rl.algo.load_function import load_loss
from megatron_fp8rl.commands.distill import DistillOptions, configure
from megatron_fp8rl.config import ConfigError, ParallelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.distill import Distillation
from megatron_fp8rl.preflight import teachers
from megatron_fp8rl.rollout.teacher_client import ServedTeacher, TeacherError
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer.frozen import FrozenPolicy
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import Sample, Segment
from tests.helpers.dist import run_ranks
from tests.helpers.own_model import make_model

FP32 = PrecisionConfig(trainer="bf16", rollout="bf16", params="fp32", exact=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("teachers")
    for name in ("student", "teacher"):
        make_model(folder / name, ["How many apples has Tom?"])
    (folder / "train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    return folder


def config(folder: Path, teacher: str, precision: PrecisionConfig = FP32, **parallel: int) -> RunConfig:
    data = (str(folder / "train.jsonl"),)
    options = DistillOptions(model=str(folder / "student"), data=data, teacher=(teacher,), gpus=0)
    cfg, _ = configure(options, lambda cfg: replace(cfg, precision=precision))
    assert (
        cfg.algo.kl_coef == 1 and cfg.data.environments[0].teacher == teacher and not cfg.data.environments[0].rewards
    )
    sampling = replace(cfg.sampling, max_prompt_tokens=16, max_completion_tokens=16)
    return replace(cfg, parallel=ParallelConfig(**parallel), sampling=sampling, output_dir=str(folder / "run"))


def samples(rollout: dict[str, np.ndarray] | None = None) -> list[Sample]:
    rng, made = np.random.default_rng(0), []
    for index in range(6):
        prompt, answer = (TokenArray.from_ids(rng.integers(3, 384, n).tolist()) for n in (3 + index, 9 - index))
        logprobs = None if rollout is None else TokenArray.from_floats(rollout[f"train/{index}#0"])
        segments = (Segment(prompt), Segment(answer, logprobs, is_trained=True))
        made.append(Sample(name=f"train/{index}#0", environment="train", segments=segments))
    return made


def reference(model: Path) -> dict[str, np.ndarray]:
    """By transformers in FP32."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = {}
    for sample in samples():
        ids = torch.tensor(sample.token_ids.array.tolist())
        with torch.no_grad():
            logprobs = net(ids[None]).logits[0].log_softmax(-1)
        found[sample.name] = logprobs[:-1].gather(1, ids[1:, None])[sample.num_prompt_tokens - 1 :, 0].numpy()
    return found


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


def _update(cfg: RunConfig) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics of an update of the student on samples with its own log-probabilities, and these."""
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy = Policy.build(cfg, parallel, has_reference=Distillation.has_reference)
    assert policy.reference is None
    sampled = FrozenPolicy.build(cfg, parallel).sample_logprobs(samples())
    job = Distillation.__new__(Distillation)
    job.cfg, job.parallel, job._names = cfg, parallel, teachers.teachers_of(cfg.data)
    job._teachers = {name: job._build(name) for name in job._names.values()}
    taken = samples(sampled)
    (batch,) = job.with_reference(taken, pack_for(cfg, taken, data_rank=0))
    return policy.update(batch, load_loss(cfg.algo)), sampled


def test_the_loss_of_a_student_that_equals_its_teacher_is_zero(folder: Path):
    exact = PrecisionConfig(exact=True)  # FP8 at both ends
    (result,) = run_ranks(1, _update, config(folder, str(folder / "student"), exact))
    metrics, _ = result
    assert metrics["train/loss/mean"] == metrics["loss/kl_ref/mean"] == metrics["train/grad_norm/max"] == 0


def test_the_loss_is_the_reverse_kl_of_the_sampled_tokens(folder: Path):
    (result,) = run_ranks(1, _update, config(folder, str(folder / "teacher")))
    metrics, sampled = result
    taught = reference(folder / "teacher")
    difference = np.concatenate([taught[name] - sampled[name] for name in taught]).astype(np.float64)
    estimate = (np.expm1(difference) - difference).mean()  # of KL(student || teacher), Schulman's k3
    assert metrics["loss/kl_ref/mean"] == pytest.approx(estimate, rel=1e-4)
    assert metrics["train/loss/mean"] == pytest.approx(estimate, rel=1e-4) and metrics["train/grad_norm/max"] > 0


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
            entries = [
                {str(token): {"logprob": row[token].item()}}
                for token, row in zip(ids[1:].tolist(), logprobs, strict=False)
            ]
            self.reply({"choices": [{"prompt_logprobs": [None, *entries] if body["prompt_logprobs"] == 0 else None}]})

        def reply(self, content):
            data = json.dumps(content).encode()
            self.send_response(200)
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


def test_a_server_that_does_not_answer_names_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megatron_fp8rl.rollout.teacher_client._WAITS_S", (0.0,))
    with pytest.raises(TeacherError, match="http://127.0.0.1:9/v1/models: .*refused"):
        ServedTeacher("http://127.0.0.1:9", 1.0, _OneRank()).sample_logprobs(samples())
