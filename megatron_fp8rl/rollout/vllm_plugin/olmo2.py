"""OLMo-2 in an engine: vLLM's class of OLMo-3 without windows, which has the same weights and operations.

Imports vLLM's model, so that vLLM loads this module only for such an engine.
"""

from transformers import Olmo2Config, Olmo3Config
from vllm.model_executor.models import olmo3

from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="vLLM 0.26 has no class of OLMo-2: it computes transformers' modules, whose norms are not ours, and OLMo-3's "
    "class asserts the type of its configuration",
    remove_when="vLLM has a class of OLMo-2",
    optional=True,
)
class Olmo2ForCausalLM(olmo3.Olmo3ForCausalLM):
    """Its layers have full attention, because the configuration has no ``layer_types``."""


olmo3.Olmo3Config = (Olmo2Config, Olmo3Config)  # read by isinstance only
