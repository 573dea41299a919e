"""The backend oracle, where upstream has it."""
