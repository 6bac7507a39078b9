"""The parts that a pipeline takes on for what its plan and its modules need."""
