"""Gradients of weights that several stages or replicas have: sums, norms, updates."""
