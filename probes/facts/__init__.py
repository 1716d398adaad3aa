"""What writing a user's facts into rows does: check, layers, density, alternatives."""
