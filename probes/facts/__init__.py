"""Probes of a user's facts, written into rows."""
