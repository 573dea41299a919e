"""The build on the stable ABI of torch: what the extension ``w4a8._C`` does, without a compiled Python module."""
