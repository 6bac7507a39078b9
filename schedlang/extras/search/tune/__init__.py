"""Which program, with which parameters, trains a model fastest within the memory of its ranks."""
