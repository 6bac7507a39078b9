"""Figures, idle times and pictures of an execution."""
