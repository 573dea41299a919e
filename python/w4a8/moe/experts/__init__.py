"""Experts classes, under the module names that upstream gives them."""
