"""One stage of the model: what each action means on a torch module."""
