"""Record the results of the trainer's operations for one prompt, and replay the operations on the engine's inputs.

Results are [T, features] on the host, by the names of ``diagnose/operations.py``. The forward pass is that of old
log-probabilities: packed, padded to the trainer's multiples, in evaluation mode, under the training recipe.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.diagnose.operations import operation_names
from megatron_fp8rl.names import registry
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer.forward import Forward
from megatron_fp8rl.trainer.model.build import unwrap
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.types import Sample, Segment

_Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]  # module, positional and keyword arguments


class TrainerProbe:
    """One recorded forward pass; ``chunks`` are those of a Policy or of ``build_chunks``."""

    def __init__(self, chunks: Sequence[nn.Module], cfg: RunConfig, parallel: Parallel):
        """Raises ValueError if this rank does not have the whole model, or if the model cannot be probed."""
        split = [name for name in ("tensor", "pipeline", "context", "expert") if getattr(cfg.parallel, name) > 1]
        if split or len(chunks) != 1:
            name = split[0] if split else "virtual_stages"
            raise ValueError(f"a probe needs a rank with the whole model, but parallel.{name} is above 1")
        self.cfg, self.parallel, self.names = cfg, parallel, operation_names(cfg.model)
        self._chunks, self._model = chunks, unwrap(chunks[0])
        self._num_tokens = 0
        self._calls: dict[str, _Call] = {}

    def record(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        self._num_tokens, self._calls = len(token_ids), {}
        (batch,) = pack_for(self.cfg, [_as_sample(token_ids)], data_rank=0)
        results: dict[str, Tensor] = {}
        hooks = []
        for name, module in self._modules():

            def keep(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                self._calls[name] = module, args, kwargs
                stream = _STREAM_INTO.get(name.rpartition(".")[2])
                if stream is not None:
                    results[name.removesuffix(name.rpartition(".")[2]) + stream] = self._rows(args[0])
                results[name] = self._result(name, module, args, output)

            hooks.append(module.register_forward_hook(keep, with_kwargs=True))
        try:
            Forward(self.cfg, self.parallel).logprobs(self._chunks, batch.microbatches)
        finally:
            for hook in hooks:
                hook.remove()
        results["logits"] = self._logits(results["final_norm"])
        for name in self.names:
            if name.endswith(".activation"):
                _, (activation, *_), _ = self._calls[name.replace("activation", "down")]
                results[name] = self._rows(activation)
        return {name: results[name] for name in self.names}

    @torch.no_grad()
    def replay(self, engine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The results of all operations on the engine's inputs, for the prompt passed to :meth:`record`."""
        training = self._model.training
        self._model.eval()
        try:
            results = {"embedding": self._again("embedding"), **self._replay_end(engine)}
            for layer in range(self.cfg.model.num_layers):
                results |= self._replay_layer(layer, engine)
        finally:
            self._model.train(training)
        return results

    def _replay_layer(self, layer: int, engine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        model, at = self.cfg.model, f"layer.{layer}."
        stream = engine["embedding"] if layer == 0 else self._sum_after(layer - 1, engine)
        results = {at + "input": stream}

        def again(operation: str, *inputs: Tensor) -> None:
            results[at + operation] = self._again(at + operation, *inputs)

        again("input_norm", engine[at + "input"])
        again("qkv", engine[at + "input_norm"])
        heads = (model.num_attention_heads, model.num_key_value_heads, model.num_key_value_heads)
        q, k, v = engine[at + "qkv"].split([num * model.head_dim for num in heads], dim=1)
        if model.qk_norm:
            again("q_norm", q)
            again("k_norm", k)
            q, k = engine[at + "q_norm"], engine[at + "k_norm"]
        again("attention", q, k, v)
        again("o_proj", engine[at + "attention"])
        results[at + "middle"] = self._add(engine[at + "input"], engine[at + "o_proj"])
        again("post_norm", engine[at + "middle"])
        if model.layers[layer].is_moe:
            again("router", engine[at + "post_norm"])
            again("experts", engine[at + "post_norm"])
        else:
            again("gate_up", engine[at + "post_norm"])
            gate, up = self._to_model(engine[at + "gate_up"]).chunk(2, dim=-1)
            results[at + "activation"] = (self._model.config.activation_func(gate) * up).cpu()
            again("down", engine[at + "activation"])
        return results

    def _replay_end(self, engine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            "final": self._sum_after(self.cfg.model.num_layers - 1, engine),
            "final_norm": self._again("final_norm", engine["final"]),
            "logits": self._logits(engine["final_norm"]),
        }

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield "embedding", self._model.embedding
        for index, layer in enumerate(self._model.decoder.layers):
            at, attention, mlp = f"layer.{index}.", layer.self_attention, layer.mlp
            yield at + "input_norm", layer.input_layernorm
            yield at + "qkv", attention.linear_qkv
            if self.cfg.model.qk_norm:
                yield at + "q_norm", attention.q_layernorm
                yield at + "k_norm", attention.k_layernorm
            yield at + "attention", attention.core_attention
            yield at + "o_proj", attention.linear_proj
            yield at + "post_norm", layer.pre_mlp_layernorm
            if self.cfg.model.layers[index].is_moe:
                yield at + "router", mlp.router
                yield at + "experts", mlp
            else:
                yield at + "gate_up", mlp.linear_fc1
                yield at + "down", mlp.linear_fc2
        yield "final_norm", self._model.decoder.final_layernorm

    def _again(self, name: str, *inputs: Tensor) -> Tensor:
        """Repeat the recorded call with the tokens of its first arguments replaced; the padding stays."""
        module, args, kwargs = self._calls[name]
        replaced = list(args)
        for index, rows in enumerate(inputs):
            tensor = args[index].clone()
            tensor[: self._num_tokens] = rows.to(tensor).view_as(tensor[: self._num_tokens])
            replaced[index] = tensor
        return self._result(name, module, replaced, module(*replaced, **kwargs))

    def _result(self, name: str, module: nn.Module, args: Sequence[Any], output: Any) -> Tensor:
        operation = name.rpartition(".")[2]
        if operation == "router":  # returns weights and choice; its logits come first
            return self._rows(module.gating(args[0]))
        rows = self._rows(output)
        if operation != "qkv":
            return rows
        weight = registry.weight(
            f"decoder.layers.{name.split('.')[1]}.self_attention.linear_qkv.weight", self.cfg.model
        )
        return torch.cat(registry.slicing.split(weight, self.cfg.model, rows.t(), 1, 0)).t()

    def _rows(self, output: Any) -> Tensor:
        """[tokens, features] on the host, from a tensor [T, ...] or a pair of result and bias."""
        tensor = output[0] if isinstance(output, tuple) else output
        # A copy: without gradients, Megatron-Core adds the residual stream into the memory of the branch.
        return tensor.detach().reshape(tensor.shape[0], -1)[: self._num_tokens].to("cpu", copy=True)

    def _logits(self, final_norm: Tensor) -> Tensor:
        """The last token's logits, as ``trainer/logprobs.py`` computes them: rounded to the parameter dtype."""
        model = self._model
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        last = final_norm[-1:].to(weight)
        return (last @ weight.detach()[: self.cfg.model.vocab_size].t()).cpu()

    def _sum_after(self, layer: int, engine: Mapping[str, Tensor]) -> Tensor:
        out = "experts" if self.cfg.model.layers[layer].is_moe else "down"
        return self._add(engine[f"layer.{layer}.middle"], engine[f"layer.{layer}.{out}"])

    def _add(self, stream: Tensor, branch: Tensor) -> Tensor:
        return (self._to_model(stream) + self._to_model(branch)).cpu()

    def _to_model(self, x: Tensor) -> Tensor:
        return x.to(self._model.decoder.final_layernorm.weight)


# Norms whose input is a residual stream, and the name of that stream.
_STREAM_INTO = {"input_norm": "input", "post_norm": "middle", "final_norm": "final"}


def _as_sample(token_ids: Sequence[int]) -> Sample:
    """A sequence in which all tokens but the first carry loss, so that the forward pass runs the output head."""
    tokens = TokenArray.from_ids(token_ids)
    segments = Segment(tokens[:1]), Segment(tokens[1:], is_trained=True)
    return Sample(name="probe", environment="probe", segments=segments)
