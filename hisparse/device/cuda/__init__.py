"""The `cuda` backend, as far as it stands: the kernels, and the resolver that launches them."""
