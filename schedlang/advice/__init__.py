"""What a user is told beside an error: a repair, the smallest size that shows it."""
