"""The `cpu` backend: numpy bytes on simulated streams, deterministic by seed."""
