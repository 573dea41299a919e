"""The argument of from_pretrained, and the quantization_config of a packed directory."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from w4a8.core.activation_groups import check_activation_group
from w4a8.formats.packed_directory import FORMAT, METHOD, VERSION, check_stated
from w4a8.integrations.transformers.cache import KINDS
from w4a8.nn import QuantOptions
from w4a8.quantization.skip import Skipped


class W4A8Config(QuantizationConfigMixin):
    """Options of quantizing while loading: the options of ``w4a8.quantize_`` that JSON can hold."""

    def __init__(
        self,
        options: QuantOptions | int | None = None,
        *,
        skip: str | Iterable[str] = (),
        default_skip: bool = True,
        fuse: str | None = None,
        quant_method: str = METHOD,
        format: str | None = None,
        version: int = VERSION,
        packed: Iterable[str] | None = None,
        **fields: Any,
    ) -> None:
        """Takes the options.

        Args:
            options: a :class:`w4a8.nn.QuantOptions`, or its group size alone.
            skip: names of other modules to leave alone, and ``re:`` with regular expressions. Of a checkpoint of codes:
                of experts that become floats on the accelerator of ``device_map``; without one it has no effect.
            default_skip: leave output layers and routers alone as well; False quantizes the linear layers among them.
            fuse: run all layers in one call if possible (:func:`w4a8.integrations.transformers.fuse`), with this kind
                of cache, "int8" or "bfloat16"; None: do not. Not saved.
            quant_method, format, version: of a config.json; ``format`` is None for weights of floats.
            packed: of a config.json: the packed tensors of the directory; None: not listed.
            **fields: of :class:`w4a8.nn.QuantOptions`, by name. ``activation_group`` also applies to checkpoints of
                other methods; None: as the checkpoint says, if it does. In a packed directory the tensors have the
                group.

        Raises:
            TypeError, ValueError: as :class:`w4a8.nn.QuantOptions`.
            TypeError: ``skip`` is a function, which config.json cannot hold.
            ValueError: this version does not know the format of the directory, or the kind of cache.
        """
        if isinstance(options, QuantOptions):
            fields = {**options.to_dict(), **fields}
            options = None
        self.quant_method = METHOD
        # A checkpoint of another method has its own groups, matrix by matrix.
        self.activation_group = fields.pop("activation_group", None)
        check_activation_group(self.activation_group)
        self._options = QuantOptions.of(options, fields)
        if callable(skip):
            raise TypeError("skip is a function, which config.json cannot hold: give names or 're:' and a pattern")
        self.skip = [skip] if isinstance(skip, str) else list(skip)
        self.default_skip = default_skip
        self.skipped()  # refuses what is neither a name nor a pattern
        check_stated(quant_method, FORMAT if format is None else format, version)
        if fuse not in (None, *KINDS):
            raise ValueError(f"fuse is {fuse!r}, expected None or one of {', '.join(KINDS)}")
        self.fuse = fuse
        self.format = format
        self.packed = packed
        self.source: dict[str, Any] | None = None

    def for_source(self, source: dict[str, Any]) -> W4A8Config:
        """The config for a checkpoint that another method quantized: ``source`` is its quantization_config."""
        other = copy.deepcopy(self)
        other.source = source
        return other

    def skipped(self) -> Skipped:
        """What to leave alone."""
        return Skipped(self.skip, self.default_skip)

    def quant_options(self) -> QuantOptions:
        """Of quantizing floats.

        Raises:
            ValueError: an ``activation_group`` that does not divide the group size.
        """
        return replace(self._options, activation_group=self.activation_group)

    def to_dict(self) -> dict[str, Any]:
        """The dict for config.json: every model is saved packed."""
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "version": VERSION,
            "skip": list(self.skip),
            "default_skip": self.default_skip,
            **self._options.to_dict(),
            "activation_group": self.activation_group,
            **({} if self.packed is None else {"packed": self.packed}),
        }
