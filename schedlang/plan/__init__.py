"""The plan file, written and read; and torch's action tables, written and read."""
