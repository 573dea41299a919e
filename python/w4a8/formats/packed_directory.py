"""What config.json says in its quantization_config of a directory of packed weights (docs/transformers.md)."""

METHOD = "w4a8"
# Of the tensors: how modules and their packed tensors are named.
FORMAT, VERSION = "packed", 1
