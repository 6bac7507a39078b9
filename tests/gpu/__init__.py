"""What the runtime does on a GPU: `make gpu`."""
