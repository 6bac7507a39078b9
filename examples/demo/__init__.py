"""What `torchrun -m schedlang.runtime` trains: a small GPT on text that every machine has."""
