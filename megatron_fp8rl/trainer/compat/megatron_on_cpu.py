"""Run unmodified Megatron-Core on CPUs with gloo.

Every training program calls ``install()`` before importing Megatron-Core. It rejects untested versions; with a GPU it
changes nothing else. Without a GPU, the global ``torch`` of modules in ``megatron.core`` becomes a proxy whose current
CUDA device is the CPU. The real ``torch`` is unchanged, so vLLM and transformers in the same process are not affected.

Two methods change for the whole process once Megatron-Core is imported: ``Tensor.cuda()``, which would raise without a
driver, and ``Tensor.type()``, whose result differs for callers in ``megatron.core``. The rest are small patches,
applied right after a module is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import queue
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_fp8rl import upstream
from megatron_fp8rl.upstream import patches

_CPU = torch.device("cpu")
_FACTORIES = (
    "empty zeros ones full tensor as_tensor arange linspace eye rand randn randint randperm empty_like zeros_like "
    "ones_like full_like rand_like empty_strided"
).split()


class _Stream:
    """CPU work runs in order, so all streams are the same and never wait."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _Event:
        return _Event()

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__


class _Event:
    """An event that is always complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _Proxy(types.ModuleType):
    def __init__(self, real: types.ModuleType, **replaced: Any):
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_real"], name)
        if not name.startswith("__"):
            self.__dict__[name] = value
        return value


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _no_context(*args: Any, **kwargs: Any) -> contextlib.nullcontext:
    return contextlib.nullcontext()


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory to treat CUDA devices as the CPU and ignore pin_memory."""

    @functools.wraps(factory)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or str(device).startswith("cuda")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return wrapper


def _keep(function: Any = None, **kwargs: Any) -> Any:
    """No-op ``torch.compile``: compiling small fusions needs a C++ compiler and gains nothing."""
    return (lambda f: f) if function is None else function


def _cuda_view() -> _Proxy:
    stream = _Stream()
    return _Proxy(
        torch.cuda,
        current_device=lambda: _CPU,
        device_count=lambda: 1,
        set_device=_nothing,
        synchronize=_nothing,
        empty_cache=_nothing,
        current_stream=lambda *args: stream,
        default_stream=lambda *args: stream,
        Stream=_Stream,
        Event=_Event,
        stream=_no_context,
        device=_no_context,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *args, **kwargs: torch.get_rng_state(),
        set_rng_state=lambda state, *args, **kwargs: torch.set_rng_state(state),
        is_current_stream_capturing=lambda: False,
        memory_allocated=lambda *args: 0,
        memory_reserved=lambda *args: 0,
        max_memory_allocated=lambda *args: 0,
        get_device_capability=lambda *args: (0, 0),
        nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_no_context),
    )


def _torch_view() -> _Proxy:
    return _Proxy(
        torch,
        cuda=_cuda_view(),
        compile=_keep,
        autocast=lambda kind="cpu", **kwargs: torch.autocast("cpu" if kind == "cuda" else kind, **kwargs),
        **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES},
    )


@patches(
    "megatron-core",
    why="modules of megatron.core use torch.cuda for devices, streams and events, and hardcode the device name cuda",
    remove_when="Megatron-Core gets its device from one place that can be the CPU",
)
class _Loader(importlib.machinery.SourceFileLoader):
    view: _Proxy

    def exec_module(self, module: types.ModuleType) -> None:
        real = torch.compile
        torch.compile = _keep  # used as a decorator while the module's body runs
        try:
            super().exec_module(module)
        finally:
            torch.compile = real
        if module.__dict__.get("torch") is torch:
            module.torch = self.view
        if (repair := _REPAIRS.get(module.__name__)) is not None:
            repair(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("megatron.core"):
            return None
        if name == "megatron.core":
            _replace_tensor_methods()
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


@patches(
    "megatron-core",
    why="optimizers select parameters by p.type() == 'torch.cuda.FloatTensor', and some modules call Tensor.cuda()",
    remove_when="Megatron-Core checks is_cuda or the device, and calls Tensor.to",
)
def _replace_tensor_methods() -> None:
    real_type = torch.Tensor.type

    def answer_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron-Core's optimizers select parameters by ``p.type() == "torch.cuda.FloatTensor"``.
        answer = real_type(self, *args, **kwargs)
        asks = not args and not kwargs and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core")
        return answer.replace("torch.", "torch.cuda.", 1) if asks else answer

    torch.Tensor.type = answer_type
    torch.Tensor.cuda = lambda self, *args, **kwargs: self


@patches(
    "megatron-core",
    why="the RNG state tracker reads CUDA generators; on a CPU there is only one generator",
    remove_when="the RNG state tracker supports generators of any device",
)
def _repair_rng_tracker(random: types.ModuleType) -> None:
    """Track the states of the single CPU generator."""
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    class CpuRngStatesTracker(random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            if name not in self.states_:
                raise KeyError(f"random state {name!r} was never added; seed the model-parallel generators first")
            outer_state, outer_name = torch.get_rng_state(), self._current_state_name
            self._current_state_name = name
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer_state)
                self._current_state_name = outer_name

    random.CudaRNGStatesTracker = CpuRngStatesTracker


@patches(
    "megatron-core",
    why="gloo's all-gather supports only equal shapes, but the token dispatcher gathers uneven ones",
    remove_when="gloo gathers uneven shapes",
)
def _repair_uneven_gather(mappings: types.ModuleType) -> None:
    """Pad to the longest part, gather, remove the padding."""
    real = mappings._gather_along_first_dim

    @functools.wraps(real)
    def gather(input_, group, output_split_sizes=None, use_global_buffer=False):
        sizes = [] if output_split_sizes is None else [int(size) for size in output_split_sizes]
        if group.size() == 1 or len(set(sizes)) <= 1:
            return real(input_, group, output_split_sizes, use_global_buffer)
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = input_.new_empty((len(sizes) * max(sizes), *input_.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(gathered.chunk(len(sizes)), sizes)])

    mappings._gather_along_first_dim = gather


@patches(
    "torch",
    why="on a CPU the gradient of a BF16 embedding is accumulated in BF16, token by token, which loses a tenth of it "
    "after 3,000 equal tokens",
    remove_when="torch accumulates it in FP32",
)
def _repair_embedding_gradient(layers: types.ModuleType) -> None:
    """Look up in FP32, so that the gradient is rounded only once."""
    functional = layers.F

    def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, weight.float()).to(weight.dtype)

    layers.F = _Proxy(functional, embedding=embedding)


@patches(
    "megatron-core",
    why="the all-to-all dispatcher converts split sizes to numbers only if they are CUDA tensors",
    remove_when="maybe_move_tensor_to_cpu also converts CPU tensors",
)
def _repair_token_splits(token_dispatcher: types.ModuleType) -> None:
    real = token_dispatcher.maybe_move_tensor_to_cpu

    def move(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else real(tensor)

    token_dispatcher.maybe_move_tensor_to_cpu = move


@patches(
    "megatron-core",
    why="with torch's AdamW (no Transformer Engine or Apex) the distributed optimizer's checkpoints fail in four ways",
    remove_when="Megatron-Core tests the distributed optimizer with torch.optim.AdamW",
)
def _repair_optimizer_state(distrib_optimizer: types.ModuleType) -> None:
    """``state_dict`` asserts before the first step and on ranks without parameters (of experts, if all layers of a
    stage are dense). Loading omits ``step``, and shares one ``step`` tensor among all parameters, which AdamW then
    increments once per parameter."""
    DistributedOptimizer = distrib_optimizer.DistributedOptimizer
    save, load = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict(self):
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                if not self.optimizer.state[param]:
                    state = {key: torch.zeros_like(param) for key in self.optimizer_state_keys}
                    self.optimizer.state[param] = state | {"step": torch.zeros(())}
        if self.optimizer.state:
            return save(self)
        step = max(group.get("step", 0) for group in self.optimizer.param_groups)
        self.optimizer.state["no parameter"] = {"step": torch.tensor(float(step))}
        try:
            return save(self)
        finally:
            del self.optimizer.state["no parameter"]

    def load_state_dict(self, state_dict):
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    def set_main_param_and_optimizer_states(self, model_param, tensors):
        set_states(self, model_param, {"step": None, **tensors})

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_main_param_and_optimizer_states


@patches(
    "megatron-core",
    why="the checkpoint writer gets its queue from a manager process: spawning it imports __main__ again (seconds per "
    "rank, and a failure without a main guard), and it outlives a rank that is killed",
    remove_when="synchronous saves start no manager process",
)
def _repair_checkpoint_queue(filesystem_async: types.ModuleType) -> None:
    """Saves are synchronous, with writer threads in this process, so a local queue suffices."""
    filesystem_async.get_write_results_queue = lambda mp_mode=None: queue.Queue()


_REPAIRS = {
    "megatron.core.tensor_parallel.random": _repair_rng_tracker,
    "megatron.core.tensor_parallel.mappings": _repair_uneven_gather,
    "megatron.core.tensor_parallel.layers": _repair_embedding_gradient,
    "megatron.core.transformer.moe.token_dispatcher": _repair_token_splits,
    "megatron.core.optimizer.distrib_optimizer": _repair_optimizer_state,
    "megatron.core.dist_checkpointing.strategies.filesystem_async": _repair_checkpoint_queue,
}
_installed = False


def install() -> None:
    """Check versions and, without a GPU, make Megatron-Core run on the CPU. Idempotent. Raises
    upstream.UntestedVersion, and without a GPU RuntimeError if Megatron-Core is already imported."""
    global _installed
    if _installed:
        return
    upstream.check()
    if not torch.cuda.is_available():
        if "megatron.core" in sys.modules:
            raise RuntimeError("Megatron-Core was imported before megatron_on_cpu.install(): call that first")
        _Loader.view = _torch_view()
        sys.meta_path.insert(0, _Finder())
    _installed = True


def require_installed() -> None:
    if not _installed:
        raise RuntimeError(
            "this program has not called megatron_fp8rl.trainer.compat.megatron_on_cpu.install(), which checks "
            "versions and lets Megatron-Core run on CPUs: call it first, before Megatron-Core is imported"
        )
