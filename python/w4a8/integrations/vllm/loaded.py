"""Actions on a loaded model of vLLM: small matrices move together, packed embeddings and output layers get a stand-in
for their weight, and one line of the log says what runs here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from w4a8.core.activation_groups import in_words
from w4a8.core.memory import move_together
from w4a8.core.words import counted, gigabytes, weights_in_words
from w4a8.cpu import active_kernel
from w4a8.integrations.vllm.binding import say_cpus
from w4a8.integrations.vllm.config import is_ours
from w4a8.integrations.vllm.log import logger
from w4a8.integrations.vllm.products import products_of
from w4a8.ops import PackedHeader, read_header

# Layers with weights to multiply by, and their names in the line.
_LAYERS = ((RoutedExperts, "layer of experts"), (ParallelLMHead, "output layer"), (LinearBase, "linear layer"))


def after_loading(action: Callable[[Any, Any, Any], None], of_all: bool = True) -> None:
    """Lets vLLM's loaders call ``action(model, vllm_config, model_config)`` after loading a model.

    Args:
        action: may change the model; raises nothing.
        of_all: of each model; False: of those that are quantized here.

    Raises:
        RuntimeError: vLLM's loaders are not as expected.
    """
    if not hasattr(BaseModelLoader, "load_model"):
        raise RuntimeError("BaseModelLoader has no load_model")
    load_model = BaseModelLoader.load_model
    if not hasattr(load_model, "w4a8"):

        @wraps(load_model)
        def wrapped(self: Any, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            model = load_model(self, vllm_config, model_config, *args, **kwargs)
            for each, of_all in wrapped.w4a8.items():
                if of_all or is_ours(vllm_config.quant_config):
                    each(model, vllm_config, model_config)
            return model

        wrapped.w4a8 = {}
        BaseModelLoader.load_model = wrapped
    BaseModelLoader.load_model.w4a8[action] = of_all


def before_loading_again(model: Any, action: Callable[[], Any]) -> None:
    """Calls ``action()`` before a loaded model reads weights again (``reload_weights``)."""
    load_weights = model.load_weights

    @wraps(load_weights)
    def loading(*args: Any, **kwargs: Any) -> Any:
        action()
        return load_weights(*args, **kwargs)

    model.load_weights = loading


def move_weights_together(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Moves small packed matrices of a loaded model into huge pages."""
    owners: dict[torch.Tensor, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for product in products_of(module):
            parameter = getattr(module, product.parameter)
            if product.group is not None and parameter.dim() == 1:
                owners.setdefault(parameter, []).append((module, product.parameter))

    def put(old: torch.Tensor, moved: torch.Tensor) -> None:
        new = torch.nn.Parameter(moved, requires_grad=False)
        vars(new).update(vars(old))  # its loader
        for module, name in owners[old]:
            module.register_parameter(name, new)
        del owners[old]

    move_together(list(owners), put)


def give_stand_ins(model: torch.nn.Module, vllm_config: Any, model_config: Any) -> None:
    """Gives packed embeddings and output layers of a loaded model a weight of NaN that takes no memory.

    vLLM's LoRA asks these layers for the type and the device of their weight, its draft models for the shape.
    """
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding) and products_of(layer) and not hasattr(layer, "weight"):
            nan = torch.full((), torch.nan, dtype=layer.params_dtype)
            layer.weight = nan.expand(layer.num_embeddings_per_partition, layer.embedding_dim)


def _headers(layer: torch.nn.Module) -> Iterator[tuple[torch.Tensor, PackedHeader]]:
    """The packed tensors of a layer, uint8 [bytes] or [experts, bytes], and the header of the first matrix of each."""
    for product in products_of(layer):
        tensor = getattr(layer, product.parameter)
        if product.group is not None and tensor.numel() > 0:
            yield tensor, read_header(tensor.data if tensor.dim() == 1 else tensor.data[0])


def _why(layer: torch.nn.Module) -> str:
    """Why vLLM runs a layer itself."""
    method = type(getattr(layer, "quant_method", None)).__name__
    return "not quantized" if method.startswith(("Unquantized", "NoneType")) else f"by its {method}"


def summary(model: torch.nn.Module) -> str:
    """The line for a loaded model of vLLM, of this rank."""
    here: Counter[str] = Counter()
    left: Counter[str] = Counter()
    activations: Counter[str] = Counter()
    total = 0
    for layer in model.modules():
        kind = next((name for cls, name in _LAYERS if isinstance(layer, cls)), None)
        if kind is None:
            continue
        found = list(_headers(layer))
        if not found:
            left[f"{kind}: {_why(layer)}"] += 1
            continue
        weights = dict.fromkeys(weights_in_words(header) for _, header in found)
        here[f"{kind}: {' and '.join(weights)}"] += 1
        activations.update(in_words(header["activation_group"]) for _, header in found)
        total += sum(tensor.nbytes for tensor, _ in found)
    parts = []
    if here:
        groups = " and ".join(name for name, _ in activations.most_common())
        packed = f"{gigabytes(total)} packed"
        parts.append(f"runs {counted(here)}: {packed}, activations {groups}, kernel {active_kernel()}")
    else:
        parts.append("runs no layer of this model")
    if left:
        parts.append(f"vLLM runs {counted(left)}")
    return "; ".join(parts)


def say_what_is_loaded(model: Any, vllm_config: Any, model_config: Any) -> None:
    """Logs the line for a loaded model."""
    try:
        logger().info("w4a8: %s", summary(model))
        say_cpus(vllm_config)
    except Exception as error:  # a line in the log stops no server
        logger().warning("w4a8: cannot say what runs here: %s: %s", type(error).__name__, error)
