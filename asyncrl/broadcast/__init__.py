"""STAGE 6: versioned weights to the generators."""
