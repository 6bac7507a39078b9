"""The best order of the ops of a schedule, and a proof of how good it is."""
