"""Searches: for a better order of ops, for a program and its parameters, for a better partition."""
