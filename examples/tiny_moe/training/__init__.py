"""Where the checkpoint comes from, and what kinds of weights and formats cost on it. Run from the folder above."""
