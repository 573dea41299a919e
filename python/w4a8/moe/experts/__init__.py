"""The experts classes, where upstream has them."""
