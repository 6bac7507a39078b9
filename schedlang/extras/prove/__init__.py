"""Proofs of programs for every size: any number of microbatches, or of ranks."""
