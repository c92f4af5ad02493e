"""How much of published weights changes per step, and whether sending the changes alone is faster.

    python -m benchmarks.delta shapes              Adam on matrices of real shapes, on a CPU
    python -m benchmarks.delta run --lr 1e-6 1e-5  whole runs of a tiny model, publication by publication
    python -m benchmarks.delta links --gbits 1 10  between two network namespaces with shaped links; as root

Shares count E4M3 bytes, block scales and BF16 bytes apart. A run is real: rollouts, rewards, AdamW over FP32 masters, and
every publication proven. Matrices of real shapes have weights of a trained model's spread and gradients that are noise
with a small constant part, so that Adam's steps have the size that they have late in training: about the learning rate.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.weight_sync import delta

SHAPES = {"qwen3_8b gate": (12288, 4096), "30b_a3b expert up": (768, 2048), "deepseek_v3 expert down": (7168, 2048)}
_BETAS, _EPS = (0.9, 0.95), 1e-8


def share(old: Tensor, new: Tensor) -> float:
    return (old != new).float().mean().item()


def of_shape(rows: int, columns: int, lr: float, steps: int, seed: int = 1) -> dict[str, Any]:
    """Shares that change in a step, on average after the moments have settled, and the size of a delta."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(rows, columns, generator=generator) * 0.02
    constant = 0.1 * torch.randn(rows, columns, generator=generator)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    held = [*quantize_weight(master.bfloat16(), "pow2"), master.bfloat16()]
    found: dict[str, list[float]] = defaultdict(list)
    for step in range(1, steps + 1):
        gradient = constant + torch.randn(rows, columns, generator=generator)
        first.mul_(_BETAS[0]).add_(gradient, alpha=1 - _BETAS[0])
        second.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
        corrected = first / (1 - _BETAS[0] ** step), second / (1 - _BETAS[1] ** step)
        update = lr * corrected[0] / (corrected[1].sqrt() + _EPS)
        master -= update
        new = [*quantize_weight(master.bfloat16(), "pow2"), master.bfloat16()]
        if step > steps // 2:
            bytes_ = [[tensor.contiguous().view(torch.uint8).flatten() for tensor in of] for of in (held, new)]
            found["e4m3"].append(share(bytes_[0][0], bytes_[1][0]))
            found["scales"].append(share(held[1], new[1]))
            found["bf16"].append(share(held[2].view(torch.int16), new[2].view(torch.int16)))
            start = time.perf_counter()
            payload = delta.encode(bytes_[0][0], bytes_[1][0])
            found["encode_gb_per_s"].append(bytes_[0][0].numel() / (time.perf_counter() - start) / 1e9)
            found["delta"].append((len(payload) if payload else bytes_[0][0].numel()) / bytes_[0][0].numel())
            start = time.perf_counter()
            if payload:
                delta.apply(bytes_[0][0].clone(), payload)
            found["apply_gb_per_s"].append(bytes_[0][0].numel() / (time.perf_counter() - start) / 1e9)
            found["update_over_lr"].append((update.abs().mean() / lr).item())
        held = new
    return {"lr": lr, **{name: sum(values) / len(values) for name, values in found.items()}}


def of_run(config: str, lr: float, steps: int, folder: Path) -> dict[str, Any]:
    """A whole run in this process, whose publications are measured as they are sent."""
    from megatron_fp8rl import __main__ as program
    from megatron_fp8rl import cli
    from megatron_fp8rl.weight_sync.transports import choose
    from megatron_fp8rl.weight_sync.transports.delta_group import DeltaGlooTransport

    publications: list[dict[str, list[int]]] = []

    class Measured(DeltaGlooTransport):
        """Counts, of every part that it sends, the items that have changed."""

        def begin(self, attempt: int, rounds: tuple) -> None:
            super().begin(attempt, rounds)
            self._before: dict = getattr(self, "_before", {})
            if self.staged:
                publications.append(defaultdict(lambda: [0, 0]))

        def send(self, number: int, messages: Any) -> None:
            for message in messages if self.staged else ():
                for part in message.parts:
                    start = message.out_offset + part.offset
                    item = {"float32": torch.int32, "bfloat16": torch.int16}.get(part.dtype, torch.uint8)
                    data = self.slot(number)[start : start + part.num_bytes].view(item).clone()
                    old = self._before.get((number, start))
                    if old is not None:
                        counts = publications[-1][part.dtype]
                        counts[0] += int((old != data).sum())
                        counts[1] += data.numel()
                    self._before[number, start] = data
            super().send(number, messages)
            if self.staged:
                publications[-1]["sent"][0] = self.num_sent_bytes
                publications[-1]["sent"][1] += sum(message.num_bytes for message in messages)

    choose.TRANSPORTS["gloo_delta"] = Measured
    words = [
        "train",
        config,
        "--optim.lr",
        f"{lr}",
        "--num_steps",
        f"{steps}",
        "--rollout.transport",
        "gloo",
        "--rollout.spare_weights",
        "host",
        "--rollout.delta_weights",
        "True",
        "--observe.display",
        "none",
        "--observe.eval_prompts",
        "0",
        "--output_dir",
        f"{folder}/{{name}}",
        "--checkpoint.export_hf",
        "False",
        "--optim.decay",
        "constant",
    ]
    status = cli.main(program.COMMANDS, words)
    later = [one for one in publications if one["float8_e4m3fn"][1] or one["bfloat16"][1]]
    if status or not later:
        raise RuntimeError(f"the run of {config} ended with status {status} and {len(later)} publications")
    shares = {
        name: sum(one[key][0] / max(1, one[key][1]) for one in later) / len(later)
        for name, key in (("e4m3", "float8_e4m3fn"), ("scales", "float32"), ("bf16", "bfloat16"), ("delta", "sent"))
    }
    return {"config": config, "lr": lr, "publications": len(later), **shares}


# ---- shaped links

_RECEIVE = """
import socket, sys, time, torch
from megatron_fp8rl.weight_sync import delta
size, pieces, port = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
held = torch.zeros(size, dtype=torch.uint8)
server = socket.create_server(("0.0.0.0", port)); server.settimeout(60)
print("ready", flush=True)
link, _ = server.accept(); link.settimeout(120)
def read(n):
    data = bytearray(n); view = memoryview(data); got = 0
    while got < n:
        count = link.recv_into(view[got:], n - got)
        if not count: raise SystemExit("the sender has gone")
        got += count
    return data
for _ in range(3):
    for piece in range(pieces):
        kind, n = (int.from_bytes(read(8), "little") for _ in range(2))
        target = held[piece * (size // pieces) : (piece + 1) * (size // pieces)]
        payload = read(n)
        if kind: delta.apply(target, payload)
        else: target.copy_(torch.frombuffer(payload, dtype=torch.uint8))
    link.sendall(int(held.long().sum()).to_bytes(8, "little"))
"""


def over_link(gbits: float, num_bytes: int, changed: float) -> dict[str, Any]:
    """Seconds of the whole and of a delta of ``num_bytes`` between two namespaces whose link has this rate."""
    name, port, pieces = f"fd{os.getpid() % 10_000}", 29_611, 16
    net = f"10.99.{os.getpid() % 250}"
    run = lambda *words: subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)  # noqa: E731
    run("ip", "netns", "add", name)
    try:
        run("ip", "link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
        run("ip", "addr", "add", f"{net}.1/30", "dev", f"{name}a")
        run("ip", "link", "set", f"{name}a", "up")
        run("ip", "-n", name, "addr", "add", f"{net}.2/30", "dev", f"{name}b")
        run("ip", "-n", name, "link", "set", f"{name}b", "up")
        burst = max(256_000, int(gbits * 1e9 / 8 / 250))
        run(
            "tc",
            "qdisc",
            "add",
            "dev",
            f"{name}a",
            "root",
            "tbf",
            "rate",
            f"{gbits}gbit",
            "burst",
            f"{burst}",
            "latency",
            "50ms",
        )
        command = ["ip", "netns", "exec", name, sys.executable, "-c", _RECEIVE, str(num_bytes), str(pieces), str(port)]
        receiver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert receiver.stdout is not None and receiver.stdout.readline().strip() == "ready"
            with socket.create_connection((f"{net}.2", port), timeout=30) as link:
                link.settimeout(120)
                return _time_sends(link, num_bytes, pieces, changed) | {"gbits": gbits, "bytes": num_bytes}
        finally:
            receiver.kill()
            receiver.wait()
    finally:
        subprocess.run(["ip", "link", "del", f"{name}a"], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False)


def _time_sends(link: socket.socket, num_bytes: int, pieces: int, changed: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)
    second = first.clone()
    second[torch.rand(num_bytes, generator=generator) < changed] ^= 1
    third = second.clone()
    third[torch.rand(num_bytes, generator=generator) < changed] ^= 1
    size, found, sent = num_bytes // pieces, {}, {}
    # Warm: connections open their windows. Then a delta, then the whole.
    for name, base, new in (("warm", None, first), ("delta", first, second), ("whole", None, third)):
        started, sent[name] = time.perf_counter(), 0
        for piece in range(pieces):
            at = slice(piece * size, (piece + 1) * size)
            payload = None if base is None else delta.encode(base[at], new[at])
            content = memoryview(new[at].numpy()) if payload is None else payload
            link.sendall((payload is not None).to_bytes(8, "little") + len(content).to_bytes(8, "little"))
            link.sendall(content)
            sent[name] += len(content)
        answer = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "little")
        found[f"{name}_s"] = time.perf_counter() - started
        if answer != int(new[: size * pieces].long().sum()):
            raise RuntimeError(f"the receiver holds something other than what was sent ({name})")
    return found | {"delta_bytes": sent["delta"], "changed": changed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shapes", "run", "links"))
    parser.add_argument("--lr", nargs="+", type=float, default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--config", nargs="+", default=["tiny_qwen3"])
    parser.add_argument("--gbits", nargs="+", type=float, default=[1.0, 10.0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--changed", nargs="+", type=float, default=[0.0025, 0.025])
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    if options.what == "shapes":
        rows = ({"shape": name, **of_shape(*SHAPES[name], lr, options.steps)} for name in SHAPES for lr in options.lr)
    elif options.what == "links":
        rows = (over_link(gbits, options.mib << 20, part) for gbits in options.gbits for part in options.changed)
    else:
        rows = _runs(options)
    for row in rows:
        print(json.dumps({k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return 0


def _runs(options: argparse.Namespace) -> Any:
    for config in options.config:
        for lr in options.lr:
            with tempfile.TemporaryDirectory() as folder:
                yield of_run(config, lr, options.steps, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
