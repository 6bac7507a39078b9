"""Heartbeats of ranks, and what all of them print when one fails."""
