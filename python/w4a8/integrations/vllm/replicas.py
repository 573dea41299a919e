"""Replicas of a model with experts (``--data-parallel-size``): each holds all experts and computes alone.

vLLM cuts experts over all replicas, which then take every step together, also those without a request. Its communicator
for CPUs cannot do so (0.32: no ``all_gatherv``). Replicas of a model without experts are independent engines there.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.config import ModelConfig, ParallelConfig
from vllm.engine.arg_utils import EngineArgs

from w4a8.integrations.vllm.config import is_ours
from w4a8.integrations.vllm.log import logger


class ModelOfReplicas(ModelConfig):
    """Says that the model has no experts as long as there are replicas.

    The engine process of a replica asks before plugins are loaded, and only the class of a pickled object comes before
    that. Then each replica counts itself alone, and has experts.
    """

    w4a8_parallel: Any = None  # vLLM's ParallelConfig of the same engine

    @property
    def is_moe(self) -> bool:
        """As upstream's, for one replica."""
        return super().is_moe and (self.w4a8_parallel is None or self.w4a8_parallel.data_parallel_size == 1)


def register_replicas() -> None:
    """Lets replicas of quantized models with experts compute alone.

    Raises:
        RuntimeError: vLLM's configurations are not as expected.
    """
    for owner, name in (
        (ModelConfig, "is_moe"),
        (ParallelConfig, "reconfigure_for_independent_dp_rank"),
        (EngineArgs, "create_engine_config"),
    ):
        if not hasattr(owner, name):
            raise RuntimeError(f"{owner.__name__} has no {name}")
    create_engine_config = EngineArgs.create_engine_config

    @wraps(create_engine_config)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create_engine_config(self, *args, **kwargs)
        _part(config)
        return config

    EngineArgs.create_engine_config = wrapped


def _part(config: Any) -> None:
    """Makes the replicas of a VllmConfig independent, if one server starts and feeds all of them."""
    parallel, model = config.parallel_config, config.model_config
    count = parallel.data_parallel_size
    if count == 1 or not is_ours(config.quant_config) or not model.is_moe:
        return
    # Of the first two vLLM refuses models without experts; ranks of the third take each step together.
    by_others = parallel.data_parallel_external_lb or parallel.data_parallel_rank_local is not None
    if by_others or parallel.distributed_executor_backend == "external_launcher":
        return
    model.__class__ = ModelOfReplicas
    model.w4a8_parallel = parallel
    logger().info("w4a8: each of %d replicas holds all experts, and computes alone", count)
