"""Programs at given ranks, for any number of microbatches: orders as pieces that repeat."""
