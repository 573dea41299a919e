"""Packed layers in a model that transformers is still loading: stand-ins for ``_init_weights``, and embeddings.

An output layer that shares the weight of an embedding shares its packed bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from w4a8.nn import W4A8Experts
from w4a8.nn.embedding import PackedEmbedding
from w4a8.quantization.moe_blocks import Experts, fused_experts
from w4a8.quantization.readers import reader_of

_NAMES = ("weight", "bias")


def give_stand_ins(new: torch.nn.Module, old: torch.nn.Linear) -> None:
    """Gives a packed layer a weight and a bias without storage that count as initialised, until :func:`drop_stand_ins`.

    transformers initialises missing weights, module by module. The code for a module with linear layers (T5, Mamba)
    reads their weights, loaded or not.

    Args:
        new: the module in place of the linear layer. Other modules are left alone.
        old: the linear layer.
    """
    if not isinstance(old, torch.nn.Linear):
        return
    for name in _NAMES:
        tensor = getattr(old, name)
        if tensor is not None:
            tensor = torch.empty_like(tensor, device="meta", requires_grad=False)
            tensor._is_hf_initialized = True
        new.__dict__[name] = tensor


def drop_stand_ins(module: torch.nn.Module) -> None:
    """Removes the parameters of :func:`give_stand_ins`."""
    for name in _NAMES:
        module.__dict__.pop(name, None)


def scale_of(module: torch.nn.Module) -> float | None:
    """The factor of an embedding's rows: 1 for torch's own; None: the embedding computes something else."""
    if type(module) is torch.nn.Embedding:
        return 1.0
    scale = getattr(module, "scalar_embed_scale", None)
    return scale if type(module).__name__.endswith("TextScaledWordEmbedding") else None


def output_of(model: torch.nn.Module, path: str) -> str | None:
    """The name of the linear layer that shares the weight of an embedding that can be packed, or None."""
    weight, module = f"{path}.weight", model.get_submodule(path)
    targets = [target for target, source in model.all_tied_weights_keys.items() if source == weight]
    if len(targets) != 1 or scale_of(module) is None:
        return None
    name = targets[0].rpartition(".")[0]
    output = model.get_submodule(name)
    return name if type(output) is torch.nn.Linear and output.bias is None else None


def is_packable(model: torch.nn.Module, path: str) -> bool:
    """Whether a module is an embedding whose weight no other module reads, except :func:`output_of`."""
    module = model.get_submodule(path)
    if not isinstance(module, torch.nn.Embedding) or scale_of(module) is None:
        return False
    if output_of(model, path) is not None:
        return True
    return reader_of(model, path) is None and f"{path}.weight" not in model.all_tied_weights_keys.values()


def untie(model: torch.nn.Module, layer: str) -> None:
    """Keeps transformers from tying weights to a packed layer, in spite of the configuration."""
    keys = {target: source for target, source in model.all_tied_weights_keys.items() if target != f"{layer}.weight"}
    if len(keys) < len(model.all_tied_weights_keys):
        model.all_tied_weights_keys = keys
        # Of this model alone, from here on. transformers expands these patterns into names.
        patterns = model._tied_weights_keys or {}
        kept = {pattern: source for pattern, source in patterns.items() if not re.search(pattern, f"{layer}.weight")}
        model._tied_weights_keys = kept or None


def retie(model: torch.nn.Module) -> None:
    """Undoes :func:`untie` for weights that are one parameter, so that transformers saves the parameter once."""
    if "_tied_weights_keys" not in vars(model):
        return
    kept = vars(model).pop("_tied_weights_keys")
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = {
        target: source
        for target, source in model.get_expanded_tied_weights_keys(all_submodels=True).items()
        if target in parameters and parameters[target] is parameters.get(source)
    }
    model.all_tied_weights_keys = {**model.all_tied_weights_keys, **shared}
    if not shared:
        model._tied_weights_keys = kept


def take_out(model: torch.nn.Module, output: str) -> None:
    """Takes the output layer of a packed embedding out of the model, until :func:`share`."""
    untie(model, output)
    put(model, output, torch.nn.Module())


def packed_embedding(old: torch.nn.Module, packed: torch.Tensor, group: int) -> PackedEmbedding:
    """The packed module for an embedding with an :func:`output_of`."""
    scale = scale_of(old)
    sizes = old.num_embeddings, old.embedding_dim, group
    return PackedEmbedding(packed, *sizes, old.weight.dtype, None if scale == 1.0 else scale)


def experts_to_pack(old: torch.nn.Module) -> Experts:
    """The float experts that packed experts will replace.

    Raises:
        ValueError: the operators do not have the computation of the module.
    """
    experts = fused_experts(old)
    if experts is None or experts.activation is None:
        raise ValueError(f"packed experts, but {type(old).__name__} is no block that W4A8Experts can stand for")
    return experts


def packed_experts(experts: Experts, w13: torch.Tensor, w2: torch.Tensor, groups: Sequence[int]) -> W4A8Experts:
    """The packed module for float experts; ``groups``: weights that share a scale, of w13 and of w2."""
    sizes, how = experts.sizes[1:], {"numbers": experts.numbers, "gated": experts.gated}
    return W4A8Experts(w13, w2, *sizes, groups[0], experts.activation, groups[1], **how)


def share(model: torch.nn.Module, embedding: str, output: str) -> torch.nn.Module:
    """Gives the model the output layer of a packed embedding."""
    layer = model.get_submodule(embedding).output_layer().eval()
    put(model, output, layer)
    return layer


def put(model: torch.nn.Module, path: str, module: torch.nn.Module) -> None:
    """Puts a module in the place of another."""
    owner, _, key = path.rpartition(".")
    setattr(model.get_submodule(owner), key, module)
