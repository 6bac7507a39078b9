"""What a user is told beside an error: the smallest size that shows it, and a repair."""
