"""Names of vLLM that newer versions moved to other modules, in one file for the library and its tests.

The code tests whether a module exists; it does not compare versions.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

if find_spec("vllm.entrypoints.launchers") is None:  # vLLM 0.26
    from vllm.entrypoints.launcher import serve_http
    from vllm.entrypoints.openai.api_server import build_app, init_app_state, validate_api_server_args
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
else:  # vLLM 0.32
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import serve_http, validate_api_server_args

__all__ = [
    "batch_invariant",
    "build_app",
    "init_app_state",
    "make_arg_parser",
    "serve_http",
    "validate_api_server_args",
    "validate_parsed_serve_args",
]


def batch_invariant() -> ModuleType:
    determinism = "vllm.model_executor.determinism"  # vLLM 0.32
    package = "vllm.model_executor.layers" if find_spec(determinism) is None else determinism
    return import_module(f"{package}.batch_invariant")
