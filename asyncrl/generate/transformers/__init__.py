"""The transformers engine: continuous batching in slots over a transformers causal LM, on any machine."""
