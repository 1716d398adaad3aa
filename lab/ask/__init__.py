"""A request: flags, widgets, files and texts."""
