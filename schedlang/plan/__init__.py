"""The plan file, and tables of other tools in and out."""
