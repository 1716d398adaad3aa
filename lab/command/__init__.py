"""One file for each command of `engram-lab`."""
