"""One module for each revision, named as it."""
