"""Weights that this package reads from files when vLLM asks for them: GGUF files and packed directories.

Each rank reads its part. If vLLM joins several matrices in a linear layer, there is one product for each run of one
form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from w4a8.core.memory import placed
from w4a8.core.packer import pack_experts, pack_rows
from w4a8.core.weight import Cut, ExpertWeights, Floats, Weight
from w4a8.core.weight_utils import replace_parameter
from w4a8.integrations.vllm.config import OwnConfig, names_joined_in
from w4a8.integrations.vllm.experts_loader import is_dummy_load, random_weight
from w4a8.integrations.vllm.linear_layers import W4A8LinearMethod, lm_head_method
from w4a8.integrations.vllm.moe import W4A8MoEMethod, unsupported
from w4a8.integrations.vllm.products import Product, Share
from w4a8.integrations.vllm.settings import activation_group, lm_head_is_set


def load_pulled(layer: torch.nn.Module, param: torch.Tensor, loaded_weight: Any) -> None:
    """The loader of a parameter, bound to its layer (see ``load_expert``): reads all weights of the layer.

    When vLLM loads other weights it calls this twice, first with a ``param`` on "meta" to count copied values.

    Args:
        layer, param: of vLLM.
        loaded_weight: as of :meth:`Pulled.load`.
    """
    if not param.is_meta:
        layer.w4a8_filler.load(layer, loaded_weight)


def register_empty(layer: torch.nn.Module, names: Iterable[str]) -> None:
    """Registers parameters that are empty until the files are read."""
    for name in names:
        param = torch.nn.Parameter(torch.empty(0, dtype=torch.uint8), requires_grad=False)
        param.weight_loader = MethodType(load_pulled, layer)
        layer.register_parameter(name, param)


class FromFiles:
    """A filler whose weights are read from files."""

    is_loaded = False

    def finish(self, layer: torch.nn.Module) -> None:
        """Raises ValueError if the files were not read."""
        if self.dummy and not self.is_loaded:
            self.load(layer, self.again(random_weight))
        if not self.is_loaded:
            raise ValueError(f"{self.says}: nothing was read")


class Pulled(FromFiles):
    """A filler of a linear layer, an output layer or an embedding: this rank's part of weights."""

    def __init__(
        self, layer_name: str, where: str, weights: Sequence[Weight | Floats], is_shared: bool = False
    ) -> None:
        """Takes the weights of a layer.

        Args:
            layer_name, where: name of the layer, and of the files, for errors.
            weights: not all of them floats, in the order of their rows in the layer.
            is_shared: they are those of the embeddings, too.
        """
        self.says, self.weights = f"w4a8: {layer_name} of {where}", weights
        self.names = [] if is_shared else [weight.name for weight in weights]  # that nothing else needs
        self._sharing: list[torch.nn.Module] = []

    def share(self, embedding: torch.nn.Module) -> None:
        """Gives an embedding the parameter, too, when it is loaded."""
        self.names = [weight.name for weight in self.weights]
        self._sharing.append(embedding)

    def add_parameters(self, layer: torch.nn.Module, share: Share) -> None:
        """Registers a parameter for each product, empty until the files are read.

        Raises:
            ValueError: the weights do not fit the layer, or this rank's part cuts blocks.
        """
        self._share = share
        self.runs = self._runs(layer, self.weights)
        self.forms: list[Any] = [None] * len(self.runs)  # once packed
        self.is_multiplied = type(layer) is not VocabParallelEmbedding
        # Rows of zeros are for several ranks, which send each other the same amount.
        is_padded = isinstance(layer, VocabParallelEmbedding) and layer.tp_size > 1
        self.padding = sum(share.sizes) - self.runs[0][0].rows if is_padded else 0
        layer.w4a8 = [self._product(index, run) for index, run in enumerate(self.runs)]
        register_empty(layer, [product.parameter for product in layer.w4a8])
        self.dummy = is_dummy_load()

    def _product(self, index: int, run: Sequence[Cut]) -> Product:
        first, columns, rows = run[0].weight, run[0].columns, sum(cut.rows for cut in run) + self.padding
        group = None if isinstance(first, Floats) else columns if first.group == -1 else first.group
        return Product(f"weight_packed{index or ''}", rows, columns, group, any(cut.has_bias for cut in run))

    def _runs(self, layer: Any, weights: Sequence[Weight | Floats]) -> list[list[Cut]]:
        """This rank's parts of weights, by product."""
        try:
            cuts = _cuts(layer, weights, self._share)
        except ValueError as error:
            raise ValueError(f"{self.says}: {error}") from None
        return [list(run) for _, run in groupby(cuts, lambda cut: cut.weight.form)]

    def load(self, layer: torch.nn.Module, weights: Sequence[Weight | Floats] | None = None) -> None:
        """Reads and packs this rank's part.

        Args:
            layer: of vLLM.
            weights: others in the place of those given before, of the same forms.

        Raises:
            ValueError: values that the operators do not have, an activation group that does not fit, or other forms.
        """
        runs = self.runs if weights is None else self._runs(layer, weights)
        found = [self._product(index, run) for index, run in enumerate(runs)]
        if found != layer.w4a8:
            raise ValueError(f"{self.says}: the weights are {found}, but {layer.w4a8} are expected")
        try:
            for index, (run, product) in enumerate(zip(runs, layer.w4a8)):
                for suffix, tensor in self._read(index, run, product).items():
                    replace_parameter(layer, product.parameter + suffix, tensor)
                for other in self._sharing:
                    other.register_parameter(product.parameter, getattr(layer, product.parameter))
        except (ValueError, RuntimeError) as error:  # the second: values that the operators do not have
            raise ValueError(f"{self.says}: {error}") from error
        if getattr(layer, "bias", None) is not None:
            layer.bias.data.zero_()  # the packed matrix has it
            if any(weight.bias for weight in self.weights):
                layer.bias.weight_loader_numel = 0  # vLLM does not wait for it when it loads other weights
        self.is_loaded = True

    def _read(self, index: int, run: Sequence[Cut], product: Product) -> dict[str, torch.Tensor]:
        """The tensors of a product, by the suffix of the parameter's name."""
        if product.group is None:
            return _floats(run, self._share.dtype)
        asked = activation_group() if self.is_multiplied else None
        packed = pack_rows(run, asked, self.forms[index], self.padding)
        self.forms[index] = packed.form
        return {"": _placed(packed.bytes, [cut.weight for cut in run])}

    def again(self, other: Callable[[Weight | Floats], Weight | Floats]) -> list[Weight | Floats]:
        """Others in the place of these weights."""
        return [other(weight) for weight in self.weights]

    def tie(self) -> bool:
        """An output layer keeps its own matrix."""
        return False


def _cuts(layer: Any, weights: Sequence[Weight | Floats], share: Share) -> list[Cut]:
    """This rank's part of each weight of a layer."""
    rank, ranks, (columns, sizes, all_columns, *_) = layer.tp_rank, layer.tp_size, share
    if isinstance(layer, VocabParallelEmbedding):
        [weight], mine = weights, layer.shard_indices
        found, expected = (weight.rows, weight.columns), (layer.org_vocab_size, all_columns)
        if found != expected:
            raise ValueError(f"{weight.name} has shape {found}, but {expected} is expected")
        return [Cut(weight, mine.org_vocab_start_index, mine.org_vocab_end_index, 0, columns)]
    for weight in weights:
        if weight.columns != all_columns:
            raise ValueError(f"{weight.name} has {weight.columns} columns, but {all_columns} are expected")
    if ranks == 1 and sum(weight.rows for weight in weights) == sum(sizes):  # may be joined otherwise than here
        sizes = [weight.rows for weight in weights]
    elif len(weights) < len(sizes):
        weights = _apart(layer, weights, share.parts)
    if len(weights) != len(sizes):
        raise ValueError(f"{len(weights)} matrices, but {len(sizes)} are expected")
    return [Cut.of_rank(weight, rows, columns, rank, ranks) for weight, rows in zip(weights, sizes)]


def _apart(layer: Any, weights: Sequence[Weight | Floats], parts: Sequence[int]) -> list[Weight | Floats]:
    """The matrices of all ranks, of which the files have several in one: queries, keys and values, or gate and up.

    ``parts``: as of a :class:`Share`.
    """
    if isinstance(layer, QKVParallelLinear):
        sizes = [layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size]
        sizes.append(layer.total_num_kv_heads * layer.v_head_size)
    else:
        sizes = parts or layer.output_sizes
    ends, begin, found = list(accumulate(sizes)), 0, []
    for weight in weights:
        here = [end - begin for end in ends if begin < end <= begin + weight.rows]
        if here[-1:] != [weight.rows]:
            raise ValueError(f"{weight.name} has {weight.rows} rows, which are no sum of parts of {sizes}")
        found += [weight.of_rows(first, last) for first, last in zip([0, *here], here)]
        begin += weight.rows
    return found


def _floats(run: Sequence[Cut], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weight and bias of floats, by the suffix of the parameter's name."""
    weights, biases = [], []
    for cut in run:
        weight, bias = cut.weight.read(dtype)
        weights.append(weight[cut.begin : cut.end, cut.first : cut.last])
        biases.append(bias[cut.begin : cut.end] if cut.has_bias else torch.zeros(cut.rows, dtype=dtype))
    found = {"": torch.cat(weights)}
    return {**found, "_bias": torch.cat(biases)} if any(cut.has_bias for cut in run) else found


def _placed(packed: torch.Tensor, weights: Sequence[Weight]) -> torch.Tensor:
    """The tensor, which may be a view of a file if the weights are packed there, where W4A8_MEMORY wants it."""
    return packed if all(weight.packed is None for weight in weights) else placed(packed, stays_mapped=False)


class PulledExperts(FromFiles):
    """A filler of a layer of experts: this rank's part of weights."""

    def __init__(self, layer_name: str, where: str, experts: ExpertWeights) -> None:
        """Takes the weights of a layer; its name, and that of the files, are for errors."""
        self.says, self.experts = f"w4a8: {layer_name} of {where}", experts
        self.names = [weight.name for weight in experts.all]
        self.forms: dict[str, Any] | None = None  # once packed

    def group_sizes(self, intermediate: int, ranks: int) -> tuple[int, int]:
        """As :meth:`ExpertsFiller.group_sizes`."""
        down = self.experts.shards["w2"][0]
        if intermediate * ranks == down.columns:
            try:
                Cut.of_rank(down, down.rows, intermediate, 0, ranks)
            except ValueError as error:
                message = f"{self.says}: {error}: expert parallelism does not (--enable-expert-parallel)"
                raise ValueError(message) from None
        return self.experts.group_sizes

    def add_parameters(self, layer: torch.nn.Module, method: W4A8MoEMethod, params_dtype: torch.dtype) -> None:
        """``w13_weight_packed`` and ``w2_weight_packed``, empty until the files are read.

        Raises:
            ValueError: the weights do not fit the layer; the activation group does not fit.
        """
        experts, sizes, self.moe = self.experts, method.sizes, method.moe
        found = (experts.experts, experts.hidden, experts.intermediate, experts.is_gated, experts.bias is not None)
        inner = sizes.intermediate * self.moe.moe_parallel_config.tp_size
        expected = (self.moe.num_experts, sizes.hidden, inner, sizes.gated, self.moe.has_bias)
        if found != expected:
            names = "(experts, hidden size, intermediate size, gate, bias)"
            raise ValueError(f"{self.says}: {names} are {found}, expected {expected}")
        if not all(weight.is_fixed for weight in experts.all):
            method.groups_of_activations(activation_group())
        register_empty(layer, [product.parameter for product in layer.w4a8])
        self.dummy = is_dummy_load()

    def load(self, layer: torch.nn.Module, experts: ExpertWeights | None = None) -> None:
        """Reads and packs the experts of this rank.

        Args:
            layer: of vLLM.
            experts: others in the place of those given before, of the same forms.

        Raises:
            ValueError: gate and up are of different types, or values that the operators do not have.
        """
        parallel = self.moe.moe_parallel_config
        places = {layer._map_global_expert_id_to_local_expert_id(each): each for each in range(self.moe.num_experts)}
        local = [places[index] for index in sorted(places.keys() - {-1})]
        ranks = parallel.tp_rank, parallel.tp_size
        experts = self.experts if experts is None else experts
        try:
            _, found, self.forms = pack_experts(experts, local, activation_group(), *ranks, packed_as=self.forms)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"{self.says}: {error}") from error
        for stack, packed in found.items():
            replace_parameter(layer, f"{stack}_weight_packed", _placed(packed, experts.all))
        self.is_loaded = True

    def again(self, other: Callable[[Weight], Weight]) -> ExpertWeights:
        """As :meth:`Pulled.again`."""
        return replace(self.experts, shards={key: list(map(other, each)) for key, each in self.experts.shards.items()})


def pulled_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model whose weights are read from files."""
    return [module for module in model.modules() if isinstance(getattr(module, "w4a8_filler", None), FromFiles)]


def name_in_vllm(model: torch.nn.Module, name: str) -> str:
    """The name in vLLM's model of a tensor of a checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return name if mapper is None else mapper.get_rename_mapper().map_name(name)


class PulledConfig(OwnConfig):
    """A configuration of layers whose weights are read from files; floats stay floats.

    Attributes:
        path: of the files, for errors.
        says: what the files are, for errors.
        matrices: vLLM's name of a layer: names of its matrices in the files, one below the other.
        experts: vLLM's name of a layer of experts: the name in the files.
        embeddings: vLLM's name of embeddings whose matrix an output layer may share.
        keys_are_values: if a layer has no value matrix, its keys are also its values (Gemma 4).
    """

    path: str
    says: str
    matrices: dict[str, tuple[str, ...]]
    experts: dict[str, str]
    embeddings = "model.embed_tokens"
    keys_are_values = False

    def weight(self, name: str) -> Weight | Floats:
        """A matrix of the files."""
        raise NotImplementedError

    def expert_weights(self, name: str) -> ExpertWeights:
        """The experts of a layer."""
        raise NotImplementedError

    def is_float(self, name: str) -> bool:
        """Whether a matrix is not quantized."""
        raise NotImplementedError

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Renames modules to vLLM's names (upstream's contract)."""
        self.matrices = hf_to_vllm_mapper.apply_dict(self.matrices)
        self.experts = hf_to_vllm_mapper.apply_dict(self.experts)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer, or None (upstream's contract).

        Raises:
            ValueError: the layer cannot be run, or the files lack a matrix.
        """
        if isinstance(layer, RoutedExperts):
            return self._of_experts(layer, prefix)
        is_head = isinstance(layer, ParallelLMHead)
        if is_head and (not prefix or prefix.endswith(".head")):  # as in vLLM's EXAONE-MoE, and its heads of GLM
            prefix = "lm_head"
        method = self._of_linear(prefix) if is_head or isinstance(layer, LinearBase) else None
        if method is None and isinstance(layer, LinearBase):
            method = UnquantizedLinearMethod()
        if method is None and is_head and prefix not in self.matrices and not lm_head_is_set():
            # No matrix of its own: in the bits of the embeddings in the files, which are the output layer too.
            names = self.matrices.get(self.embeddings, ())
            if names and not self.is_float(names[0]):
                method = self._pulled(prefix, names, is_shared=True)
        return lm_head_method(layer, method)

    def _pulled(self, prefix: str, names: Sequence[str], is_shared: bool = False) -> W4A8LinearMethod:
        return W4A8LinearMethod(Pulled(prefix, self.path, [self.weight(name) for name in names], is_shared))

    def _of_linear(self, prefix: str) -> W4A8LinearMethod | None:
        is_one = prefix in self.matrices  # in the files, too: gate and up of GLM-4
        names = [prefix] if is_one else names_joined_in(prefix, self.packed_modules_mapping)
        if not self.matrices.keys() & set(names):  # vLLM calls the Mamba layers of Granite 4 otherwise than it has them
            names = [name.replace(".mixer.", ".mamba.") for name in names]
        found = [name for each in names for name in self.matrices.get(each, ())]
        lacking = [name for name in names if name not in self.matrices]
        if lacking and lacking == [name for name in names if name.endswith(".v_proj")] and self.keys_are_values:
            found, lacking = [*found, found[-1]], []
        if found and lacking:
            raise ValueError(f"w4a8: {self.path} holds no tensor for {', '.join(lacking)}")
        return None if all(map(self.is_float, found)) else self._pulled(prefix, found)

    def _of_experts(self, layer: RoutedExperts, prefix: str) -> W4A8MoEMethod:
        if prefix not in self.experts:
            raise ValueError(f"w4a8: {self.path} holds no tensors for {prefix}")
        reason = unsupported(layer.moe_config)
        if reason is not None:
            raise ValueError(f"w4a8: {prefix}: experts of a {self.says} cannot be served with {reason}")
        filler = PulledExperts(prefix, self.path, self.expert_weights(self.experts[prefix]))
        return W4A8MoEMethod(filler, layer, prefix)
