"""Record an engine's result of each operation for one prompt: the worker's part of a probe.

In: a prompt sent by a client (``diagnose/engine_probe.py``). Out: a safetensors file with the result of each operation
named in ``diagnose/operations.py``, in the engine's dtypes. Hooks run only when modules are called, so the engine must
not be compiled. CUDA graphs may stay on: without torch.compile they cover only decoding.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_Names = tuple[str, ...]  # of a module's result, or of both results of a norm: (norm, residual stream)


def _named_modules(model: nn.Module) -> Iterator[tuple[nn.Module, _Names]]:
    """Yield the modules of vLLM's Llama-like models whose results are operations."""
    body = model.model
    yield body.embed_tokens, ("embedding",)
    for index, layer in enumerate(body.layers):
        at, attention, mlp = f"layer.{index}.", layer.self_attn, layer.mlp
        yield layer.input_layernorm, (at + "input_norm", at + "input")
        yield attention.qkv_proj, (at + "qkv",)
        for name in ("q_norm", "k_norm"):
            if hasattr(attention, name):
                yield getattr(attention, name), (at + name,)
        yield attention.attn, (at + "attention",)
        yield attention.o_proj, (at + "o_proj",)
        yield layer.post_attention_layernorm, (at + "post_norm", at + "middle")
        if hasattr(mlp, "experts"):
            yield mlp.gate, (at + "router",)
            yield mlp, (at + "experts",)
        else:
            yield mlp.gate_up_proj, (at + "gate_up",)
            yield mlp.act_fn, (at + "activation",)
            yield mlp.down_proj, (at + "down",)
    yield body.norm, ("final_norm", "final")


class Probe:
    """The worker's part: call ``start_probe``, have one prompt computed, then call ``finish_probe``."""

    _probe_hooks: tuple[Any, ...] = ()
    _probed: dict[str, Tensor]

    def start_probe(self, num_tokens: int) -> None:
        """Record the next prefill of ``num_tokens`` tokens. Raises RuntimeError if the engine is compiled or has
        several ranks, or if the model's modules have other names."""
        runner = self.model_runner
        if runner.vllm_config.compilation_config.mode:
            raise RuntimeError("a probe needs engine.graphs = plain or none, because hooks do not run in compiled code")
        world_size = runner.vllm_config.parallel_config.world_size
        if world_size != 1:
            raise RuntimeError(f"a probe needs an engine on one worker (engine.tensor = 1); this one has {world_size}")
        self._drop_hooks()
        self._probed, model = {}, runner.model
        try:
            hooks = [m.register_forward_hook(self._recorder(names, num_tokens)) for m, names in _named_modules(model)]
        except AttributeError as error:
            raise RuntimeError(f"{type(model).__name__} cannot be probed: {error}") from error
        self._probe_hooks = (*hooks, model.logits_processor.register_forward_hook(self._record_logits))

    def finish_probe(self, path: str) -> list[str]:
        """Write the results to ``path`` and return their names. Raises RuntimeError if there was no prefill."""
        from safetensors.torch import save_file

        self._drop_hooks()
        if "logits" not in self._probed:
            raise RuntimeError(
                "no prefill of the whole prompt was seen between start_probe and finish_probe; drop the prefix cache "
                "before, and keep the prompt within one batch of tokens (max-num-batched-tokens)"
            )
        save_file(self._probed, path)
        return list(self._probed)

    def _drop_hooks(self) -> None:
        for hook in self._probe_hooks:
            hook.remove()
        self._probe_hooks = ()

    def _recorder(self, names: _Names, num_tokens: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, arguments: Any, output: Any) -> None:
            results = output if isinstance(output, tuple) else (output,)
            if isinstance(output, tuple) and len(names) == 1:
                results = results[:1]  # linears return (result, bias)
            elif len(results) < len(names):  # the first norm gets no residual stream to add to: the stream is its input
                results = (*results, arguments[0])
            if results[0].shape[0] < num_tokens:
                return  # a decoding step of this or of another request
            for name, result in zip(names, results, strict=True):
                if name not in self._probed:
                    # A copy: norms and rotary embedding overwrite their inputs.
                    rows = result.detach().reshape(result.shape[0], -1)[:num_tokens]
                    self._probed[name] = rows.to("cpu", copy=True).contiguous()

        return record

    def _record_logits(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        if "final_norm" in self._probed and "logits" not in self._probed:
            self._probed["logits"] = output.detach()[-1:].to("cpu", copy=True).contiguous()
