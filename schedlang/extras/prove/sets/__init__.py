"""Schedule programs proved for any number of ranks and microbatches at once, by integer sets."""
