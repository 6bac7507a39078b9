"""What writes the pages of the documentation, and what editors colour programs by."""
