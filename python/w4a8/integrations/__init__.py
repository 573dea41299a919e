"""Plugins for other projects. Each is imported by the project it belongs to, never by ``import w4a8``."""
