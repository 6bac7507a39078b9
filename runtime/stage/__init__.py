"""One stage of the model: what each op means on a torch module, and the parts of a stage."""
