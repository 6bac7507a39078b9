"""What one rank's order implies, without time: all that the runtime needs to know beside the
plan.
"""
