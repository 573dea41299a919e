"""What 4-bit weights and int8 activations cost real language models (benchmarks/README.md)."""
