"""Trainings: a small GPT behind `schedc run` (`demo`), and a script for a Llama (`train.py`)."""
