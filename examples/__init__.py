"""Trainings: a small GPT behind `schedc run` (`demo`), and a Llama of transformers."""
