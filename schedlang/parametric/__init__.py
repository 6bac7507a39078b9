"""Proofs of programs for every size: schedules whose number of microbatches, or of ranks, is any."""
