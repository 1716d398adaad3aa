"""What a KV cache remembers of a prompt: swap, map, knock out, correct, move."""
