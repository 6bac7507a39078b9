"""Gradients that several stages or ranks share: sums, ties, norms, updates."""
