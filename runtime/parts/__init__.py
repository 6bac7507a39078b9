"""The parts that a pipeline adds to its stages if its plan or its modules need them."""
