"""asyncrl: asynchronous, off-policy-tolerant reinforcement learning for language models."""

__version__ = "0.1.0"
