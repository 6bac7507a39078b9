"""The command `schedc`."""
