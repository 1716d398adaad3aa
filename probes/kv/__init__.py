"""Probes of a KV cache."""
