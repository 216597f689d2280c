"""Stage 5: the policy, its optimizer, one step at a time."""
