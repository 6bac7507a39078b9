"""Files: those of users, written whole or not at all; those of this package; and a cache."""
