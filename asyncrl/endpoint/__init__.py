"""An OpenAI-compatible HTTP endpoint over the policy of a session."""
