"""How far quantization moves a pretrained policy: KL of the float32 policy and the quantized one, by kind of scale.

    python tools/real_model.py runs/real
    python -m benchmarks.rounding --model runs/real/model --data runs/real/test.jsonl

The float32 policy samples one completion of each prompt. The weights and inputs of all linears, except the head, are
then rounded as in a run, and each sampled position is computed again in float32. Multiplying a matrix or an input by a
factor before the rounding, and dividing afterwards, gives other draws of the rounding errors: factors of two change
nothing. Runs on a CPU in some minutes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_fp8rl.precision import quantizers
from megatron_fp8rl.precision.formats import BLOCKWISE_FP32, BLOCKWISE_POW2, MXFP8, QuantFormat

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FACTORS = (1.0, 1.1, 1.3, 1.5, 1.7, 1.9)
Round = Callable[[Tensor], Tensor]


def rounding(fmt: QuantFormat, factor: float, *, is_weight: bool, keeps_maxima: bool = False) -> Round:
    """A function of a matrix, whose blocks it rounds; ``keeps_maxima`` leaves the largest value of 128 as it is."""

    def rounded(x: Tensor) -> Tensor:
        scaled = x.float() * factor
        result = (
            quantizers.dequantize(*quantizers.quantize(scaled, fmt), fmt)
            if is_weight
            else quantizers.round_activation(scaled, fmt, torch.float32)
        )
        if keeps_maxima:
            blocks = scaled.abs().unflatten(-1, (-1, 128))
            result = torch.where((blocks == blocks.amax(-1, keepdim=True)).flatten(-2), scaled, result)
        return result / factor

    return rounded


class Policy:
    """A model whose linears can be rounded, and its own completions of the prompts."""

    def __init__(self, folder: str, prompts: list[str], num_tokens: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        torch.manual_seed(0)
        self.ids = self.model.generate(
            **given, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, max_new_tokens=num_tokens
        )
        self.first = given["input_ids"].shape[1]
        sampled = self.ids[:, self.first :]
        ended = (sampled == tokenizer.eos_token_id).cumsum(1)
        self.is_sampled = (ended == 0) | ((sampled == tokenizer.eos_token_id) & (ended == 1))
        self.mask = torch.cat([given["attention_mask"], torch.ones_like(sampled)], dim=1)
        named = self.model.named_modules()
        self.linears = {n: m for n, m in named if isinstance(m, torch.nn.Linear) and "lm_head" not in n}
        self.weights = {n: m.weight.data for n, m in self.linears.items()}
        self.reference = self.logprobs(None, None)

    @torch.no_grad()
    def logprobs(self, of_weights: Round | None, of_inputs: Round | None, which: str = "") -> Tensor:
        """float32 [sampled positions, vocabulary] with rounded weights and inputs. ``which``: a regular expression that
        the names of the rounded linears contain."""
        hooks = []
        for name, linear in self.linears.items():
            is_rounded = re.search(which, name) is not None
            linear.weight.data = of_weights(self.weights[name]) if of_weights and is_rounded else self.weights[name]
            if of_inputs and is_rounded:
                hooks.append(linear.register_forward_pre_hook(lambda _, inputs: (of_inputs(inputs[0]),)))
        logits = self.model(input_ids=self.ids, attention_mask=self.mask).logits[:, self.first - 1 : -1]
        for hook in hooks:
            hook.remove()
        return logits[self.is_sampled].log_softmax(-1)

    def compare(self, of_weights: Round | None, of_inputs: Round | None, which: str = "") -> dict[str, float]:
        actual, exact = self.logprobs(of_weights, of_inputs, which), self.reference
        kl = (exact.exp() * (exact - actual)).sum(-1).mean()
        ids = self.ids[:, self.first :][self.is_sampled][:, None]
        d = (exact - actual).gather(1, ids).abs().mean()
        return {"kl": kl.item(), "d": d.item(), "entropy": -(actual.exp() * actual).sum(-1).mean().item()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True, help="jsonl rows with the column question")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion at most")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.data.read_text().splitlines()[: given.prompts]]
    policy = Policy(given.model, [row["question"] for row in rows], given.tokens)

    def pair(fmt: QuantFormat, factor: float, **how: bool) -> tuple[Round, Round]:
        return tuple(rounding(fmt, factor, is_weight=is_weight, **how) for is_weight in (True, False))

    cases = [(f"{fmt.name}, factor {c:g}", *pair(fmt, c)) for fmt in (BLOCKWISE_POW2, BLOCKWISE_FP32) for c in FACTORS]
    cases += [(f"{MXFP8.name}, factor {c:g}", *pair(MXFP8, c)) for c in FACTORS[::2]]
    pow2, fp32 = pair(BLOCKWISE_POW2, 1.0), pair(BLOCKWISE_FP32, 1.0)
    kept = rounding(BLOCKWISE_POW2, 1.0, is_weight=False, keeps_maxima=True)
    cases += [
        ("pow2 weights alone", pow2[0], None),
        ("pow2 inputs alone", None, pow2[1]),
        ("pow2 inputs alone, largest of 128 exact", None, kept),
        ("fp32 weights alone", fp32[0], None),
        ("fp32 inputs alone", None, fp32[1]),
        *((f"pow2, {kind} alone", *pow2, kind) for kind in KINDS),
    ]
    num_layers = policy.model.config.num_hidden_layers
    for edge in (1, 2, 4):
        inner = "|".join(map(str, range(edge, num_layers - edge)))
        cases.append((f"pow2, first {edge} and last {edge} layers not", *pow2, rf"\.({inner})\."))
    print(f"{int(policy.is_sampled.sum()):,} sampled tokens of {len(rows)} prompts", flush=True)
    print("| rounded | KL, nats | mean d, nats | entropy, nats |\n|---|---|---|---|")
    entropy = -(policy.reference.exp() * policy.reference).sum(-1).mean().item()
    print(f"| nothing | 0 | 0 | {entropy:.3f} |", flush=True)
    for name, *how in cases:
        result = policy.compare(*how)
        print(f"| {name} | {result['kl']:.4f} | {result['d']:.3f} | {result['entropy']:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
