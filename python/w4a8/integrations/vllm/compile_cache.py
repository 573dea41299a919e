"""The compiled models that vLLM keeps on disk: their names, and loading on CPUs.

vLLM saves a compiled model and loads it at the next start (``VLLM_USE_AOT_COMPILE``, its default). The loading ends
with a call of ``finalize_loading``, a method of vLLM's own backend. CPUs use torch's inductor directly. Its saved
models need no such step and lack the method, so vLLM 0.28 to 0.33 discards the loaded model and compiles again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from w4a8.integrations.vllm import settings
from w4a8.integrations.vllm.log import logger


@cache
def package_digest() -> str:
    """A digest of all files of this package that compute: another build or edit gets its own graphs."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".so"):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def name_after_the_plugin() -> None:
    """Tells vLLM that compiled graphs depend on the plugin, as they do on vLLM's own variables."""
    from vllm import envs

    envs.environment_variables[settings.SWITCH] = lambda: (
        f"w4a8 {package_digest()}, {settings.W4A16_SWITCH}={int(settings.runs_w4a16())}"
    )


def _plain(value: Any, depth: int = 0) -> Any:
    """The parts of a value that a graph may depend on, the same in every process: numbers, types and shapes."""
    if isinstance(value, (bool, int, float, str, Enum, torch.dtype, type(None))):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return (str(value.device), str(value.dtype), tuple(value.shape), value.stride())
    if isinstance(value, (tuple, list)):
        return [_plain(each, depth) for each in value]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if kind.startswith("w4a8.") and depth < 3 and hasattr(value, "__dict__"):
        return (kind, [(name, _plain(each, depth + 1)) for name, each in sorted(vars(value).items())])
    return kind


def _of_module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for group in (module._parameters, module._buffers):
        yield from ((name, _plain(tensor)) for name, tensor in group.items())
    for name, value in sorted(vars(module).items()):
        # Ranks are left out: each rank has its own folder already, and all share one for compiled kernels.
        if isinstance(value, (bool, int, float, torch.Tensor)) and not name.endswith("rank"):
            yield name, _plain(value)
        # Of vLLM's strings only these matter: a graph finds a layer by them.
        if name in ("quant_method", "scheme") or (name in ("layer_name", "prefix") and isinstance(value, str)):
            yield name, _plain(value)


def structure(model: Any) -> str:
    """A digest of a module's types and shapes of tensors, and of the numbers in its layers; "" for other objects.

    A saved graph has these built in, and runs without checking them again. vLLM names a graph after configurations.
    Files may hold more than these: the groups of a packed matrix, say.
    """
    if not isinstance(model, torch.nn.Module):
        return ""
    digest = hashlib.sha256()
    for name, module in model.named_modules(remove_duplicate=False):
        found = (name, f"{type(module).__module__}.{type(module).__qualname__}", list(_of_module(module)))
        digest.update(repr(found).encode())
    return digest.hexdigest()


def _cpu() -> str:
    """The instruction set of inductor's code, missing in torch's and vLLM's names: machines may share a folder."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return f"{pick_vec_isa()} {torch.backends.cpu.get_cpu_capability()}"


def load_from_disk() -> None:
    """Lets vLLM load its saved compiled models on CPUs, and names each after everything built into it.

    Does nothing if vLLM's or torch's internals have moved: models are then compiled at each start, as in stock vLLM.
    """
    try:
        from torch._dynamo.aot_compile_types import BundledAOTAutogradSerializableCallable as Saved
        from torch._inductor.cpu_vec_isa import pick_vec_isa  # noqa: F401
        from vllm.compilation import decorators

        model_hash_key = decorators._model_hash_key
    except (ImportError, AttributeError) as error:
        logger().debug("w4a8: compiled models are not loaded from disk here: %s", error)
        return
    if not getattr(model_hash_key, "w4a8", False):

        @wraps(model_hash_key)
        def with_structure(forward: Callable[..., Any]) -> str:
            return f"{model_hash_key(forward)} {structure(getattr(forward, '__self__', None))} {_cpu()}"

        with_structure.w4a8 = True
        decorators._model_hash_key = with_structure
    if not hasattr(Saved, "finalize_loading"):
        Saved.finalize_loading = _finalize_loading


def _finalize_loading(self: Any, vllm_config: Any) -> None:
    """``finalize_loading`` of a model of torch's inductor: only a wrapped object may have something to do.

    Raises:
        RuntimeError: weights are built in (vLLM's ``max_autotune`` on CPUs), perhaps of other files.
    """
    if torch._inductor.config.freezing:
        raise RuntimeError("its weights are built into it (freezing)")
    finalize = getattr(self.compiled_fn, "finalize_loading", None)
    if finalize is not None:
        finalize(vllm_config)
