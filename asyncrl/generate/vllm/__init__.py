"""vLLM: embedded in the generator, or behind a running `vllm serve`."""
