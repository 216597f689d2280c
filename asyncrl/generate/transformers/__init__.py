"""The embedded engine: a transformers causal LM, decoded in slots on any machine."""
