"""The Engram architecture, its training, and the handle through which any causal LM is run.

Importing it registers the Engram with transformers' auto classes.
"""

from engram_lab.models.engram import EngramConfig, EngramForCausalLM, EngramModel

__all__ = ["EngramConfig", "EngramForCausalLM", "EngramModel"]
