"""What every part of the package shares: int4 values, parameters, routing, activations. It knows none of its users."""
