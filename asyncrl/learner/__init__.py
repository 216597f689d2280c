"""STAGE 5: the policy and its optimizer."""
