"""Code that all parts of the package share. Imports only ``ops`` and ``compiled`` of the package."""
