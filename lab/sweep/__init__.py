"""A probe over a grid of settings."""
